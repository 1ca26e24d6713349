"""A trace file: its bytes, the slices that are read of it, and that an altered file is never read."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_router_replay.errors import RouterReplayError, StoreError
from megatron_router_replay.store import file, load_trace, save_trace
from megatron_router_replay.store.file import FORMAT, map_trace
from megatron_router_replay.trace import RoutingTrace
from tests.unit.store.store_traces import assert_same, full_trace, make_trace

# The format, byte for byte: three tokens, layers 1 and 3, top-2 of 4 experts; the last token has no route.
HEADER = (
    '{"has_token_ids": true, "has_weight_version": false, "layer_numbers": [1, 3], "num_experts": 4, "num_tokens": 3, '
    '"sample_ids": ["a", "b"], "sequence_lengths": [1, 2], "topk": 2}'
)
TENSORS = {
    "token_ids": b"\x0b\x00\x00\x00\x0c\x00\x00\x00\xff\xff\x00\x00",
    "topk_indices": b"\x03\x01\x00\x02\x01\x00\x02\x03\x00\x01\x00\x01",
    "replay_mask": b"\x01\x01\x00",
}
CHECKSUMS = {
    "header": "b0c4f2f716bd215e",
    "replay_mask": "ec6b7e19fff7a1af",
    "token_ids": "c45532985f839ff8",
    "topk_indices": "973f612c6dc30210",
}
FIELDS = (
    '"token_ids":{"dtype":"I32","shape":[3],"data_offsets":[0,12]},'
    '"topk_indices":{"dtype":"U8","shape":[3,2,2],"data_offsets":[12,24]},'
    '"replay_mask":{"dtype":"BOOL","shape":[3],"data_offsets":[24,27]}}'
)


def pinned_trace() -> RoutingTrace:
    return RoutingTrace(
        topk_indices=[[[3, 1], [0, 2]], [[1, 0], [2, 3]], [[-1, -1], [-1, -1]]],
        layer_numbers=(1, 3),
        num_experts=4,
        token_ids=[11, 12, 65535],
        sequence_lengths=(1, 2),
        sample_ids=("a", "b"),
    )


def pinned_bytes(header: str = HEADER, version: str = "4", fields: str = FIELDS) -> bytes:
    metadata = f'{{"checksums": {json.dumps(CHECKSUMS)}, "header": {header}, "version": {version}}}'
    text = f'{{"__metadata__":{{"{FORMAT}":{json.dumps(metadata)}}},{fields}'.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(TENSORS.values())


@pytest.mark.parametrize("chunk_bytes", [4, 4 << 20])
def test_the_format_is_these_bytes(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(file, "_CHUNK_BYTES", chunk_bytes)  # a checksum is of all chunks
    path = save_trace(pinned_trace(), tmp_path / "x.safetensors")
    assert path.read_bytes() == pinned_bytes()
    assert_same(load_trace(path), pinned_trace())
    assert xxhash.xxh3_64_hexdigest(TENSORS["topk_indices"]) == CHECKSUMS["topk_indices"]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "layer_numbers"),
    [(0, 256, (2,)), (1, 257, ()), (70, 256, (2, 5, 9)), (70, 257, (2, 5, 9))],
)
def test_a_trace_comes_back_as_it_was(tmp_path, num_tokens, num_experts, layer_numbers):
    trace = full_trace(num_tokens, num_experts=num_experts, layer_numbers=layer_numbers)
    assert_same(load_trace(save_trace(trace, tmp_path / "x")), trace)
    tensors = load_file(tmp_path / "x")  # by the library alone
    assert torch.equal(tensors["topk_indices"], trace.topk_indices)
    assert torch.equal(tensors["token_ids"], trace.token_ids)


def test_views_are_saved_as_what_they_show(tmp_path):
    view = make_trace(20).select_layers([2, 7]).gather_rows(slice(3, 11))
    assert_same(load_trace(save_trace(view, tmp_path / "x")), view)
    memory = torch.arange(8, dtype=torch.int32)  # values that share memory, as a transport receives them
    shared = make_trace(4)._with(token_ids=memory[:4], weight_version=memory[4:])
    assert_same(load_trace(save_trace(shared, tmp_path / "x")), shared)


@pytest.mark.parametrize("layer_numbers", [None, [7, 3], []])
@pytest.mark.parametrize("samples", [None, slice(0, 0), slice(0, 1), slice(1, None)])
def test_a_slice_is_read(tmp_path, samples, layer_numbers):
    path = save_trace(full_trace(7), tmp_path / "x")
    expected = full_trace(7) if samples is None else full_trace(7)[samples]
    expected = expected if layer_numbers is None else expected.select_layers(layer_numbers)
    loaded = load_trace(path, layer_numbers=layer_numbers, samples=samples)
    assert_same(loaded, expected)
    assert loaded.topk_indices.is_contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {"layer_numbers": [4]},
        {"samples": [1, 2]},
        *({"samples": slice(*each)} for each in ((0, 3), (-1, None), (0, 2, 2), (2, 1))),
    ],
    ids=str,
)
def test_a_slice_that_the_file_does_not_have_raises(tmp_path, options):
    path = save_trace(full_trace(7), tmp_path / "x")
    message = (
        r"no layer_number 4; it has \[2, 3, 7\]|MRR106: .*(it has 2 samples, not slice|samples=\[1, 2\] is no slice)"
    )
    with pytest.raises(StoreError, match=message):
        load_trace(path, **options)


@pytest.mark.parametrize("name", ["topk_indices", "replay_mask", "token_ids", "weight_version"])
def test_one_flipped_bit_of_a_tensor_raises_also_where_a_slice_leaves_it_out(tmp_path, name):
    path = save_trace(full_trace(7), tmp_path / "x")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    stop = start + json.loads(data[8:start])[name]["data_offsets"][1]
    data[stop - 1] ^= 1
    path.write_bytes(data)
    for samples in (None, slice(0, 1)):
        with pytest.raises(StoreError, match=f"^MRR503: cannot load {path}: the checksum of {name} is wrong"):
            load_trace(path, samples=samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header": HEADER.replace("[1, 3]", "[1, 4]")}, "MRR503: .* the checksum of its header is wrong"),
        ({"header": HEADER.replace('"num_tokens": 3', '"num_tokens": 4')}, "MRR503: .* its header cannot be read"),
        ({"version": "[" * 100_000}, "MRR503: .* its header cannot be read"),
        ({"version": "5"}, "MRR502: .* version 5; this package reads version 4"),
        ({"fields": FIELDS.replace("[3,2,2]", "[2,3,2]")}, r"MRR503: .* topk_indices is \[2, 3, 2\] torch.uint8"),
        ({"fields": FIELDS.replace("U8", "I8")}, r"MRR503: .* topk_indices is \[3, 2, 2\] torch.int8"),
        ({"fields": FIELDS.replace("replay_mask", "replay_mast")}, "MRR501: .* replay_mask"),
    ],
)
def test_an_altered_header_raises(tmp_path, changes, message):
    (tmp_path / "x").write_bytes(pinned_bytes(**changes))
    with pytest.raises(StoreError, match=message):
        load_trace(tmp_path / "x")


@given(data=st.data())
def test_a_damaged_file_is_read_as_it_was_or_raises(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged"
    content = bytearray(save_trace(full_trace(6), path).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.sampled_from([0, 1, 8, len(content)]))
    content[at : at + length] = data.draw(st.binary(max_size=8))
    path.write_bytes(content)
    with suppress(RouterReplayError):
        assert_same(load_trace(path), full_trace(6))


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "x"
    for content in (b"", b"\0" * 100, b"PK\x03\x04" + b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"^MRR501: cannot load .*x: "):
            load_trace(path)
    save_file({"topk_indices": torch.zeros(1)}, path)
    with pytest.raises(StoreError, match=r"^MRR502: cannot load .*x: .* without the metadata"):
        load_trace(path)


def killed_at(stop: int, act) -> bool:
    """Run act() in a process that kill -9 ends at its `stop`-th entry to or exit of a system call; False: it ended before."""
    ptrace = ctypes.CDLL(None).ptrace
    pid = os.fork()
    if pid == 0:
        if ptrace(0, 0, None, None):  # PTRACE_TRACEME
            os._exit(77)
        os.kill(os.getpid(), signal.SIGSTOP)
        act()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSTOPPED(status):
        pytest.skip("this machine does not allow ptrace")
    for _ in range(stop):
        assert ptrace(24, pid, None, None) == 0  # PTRACE_SYSCALL
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def test_a_writer_killed_at_any_system_call_leaves_the_old_file_or_the_new_one(tmp_path):
    path, old, new = tmp_path / "x", make_trace(5), full_trace(5000)
    found = []
    while True:
        save_trace(old, path)
        killed = killed_at(len(found) + 1, lambda: save_trace(new, path))
        found.append(load_trace(path) == new)
        assert found[-1] or load_trace(path) == old
        if not killed:
            break
    assert found == sorted(found), "the old one, and from one system call on the new one"
    assert found.count(False) > 10
    assert found.count(True) > 2


def test_a_full_disk_leaves_the_old_file_alone(tmp_path):
    path = save_trace(make_trace(5), tmp_path / "x")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(StoreError, match=r"^MRR501: cannot save .*x: "):
            save_trace(make_trace(5000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["x"]
    assert_same(load_trace(path), make_trace(5))


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(tmp_path, monkeypatch):
    path = save_trace(make_trace(5), tmp_path / "x")
    opened_again = torch.UntypedStorage.from_file  # safetensors has read the header by then

    def replace_first(*args, **kwargs):
        save_trace(make_trace(9, seed=1), path)
        return opened_again(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "from_file", replace_first)
        assert_same(load_trace(path), make_trace(5))
    assert_same(load_trace(path), make_trace(9, seed=1))


SAVE = """
import sys, time, torch
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import load_trace, save_trace
from tests.unit.store.store_traces import full_trace, make_trace
path, seconds, first = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
traces = [make_trace(50), full_trace(3000), make_trace(50, seed=1), full_trace(9)]
end, i = time.time() + seconds, first
while time.time() < end:
    save_trace(traces[i % 4], path)
    assert load_trace(path) in traces
    i += 1
print(i - first)
"""


def test_two_processes_save_and_load_one_name(tmp_path):
    seconds = 20 if os.environ.get("CI_ALL") == "1" else 2
    save_trace(make_trace(5), tmp_path / "x")
    command = [sys.executable, "-c", SAVE, tmp_path / "x", str(seconds)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen([*command, first], env=env, stdout=subprocess.PIPE, text=True) for first in "02"]
    loads = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert min(map(int, loads)) > 10
    assert os.listdir(tmp_path) == ["x"]


def test_an_error_of_torch_names_the_file(tmp_path, monkeypatch):
    path = save_trace(make_trace(5), tmp_path / "x")

    def fail(*args, **kwargs):
        raise RuntimeError("unable to mmap 56 bytes from file </proc/self/fd/3>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    with pytest.raises(StoreError, match=r"^MRR501: cannot load .*/x: unable to mmap"):
        load_trace(path)


def test_a_file_that_is_saved_again_keeps_its_mode(tmp_path):
    path = save_trace(make_trace(5), tmp_path / "x")
    path.chmod(0o600)
    save_trace(make_trace(6), path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_folder_is_named_and_a_json_file_is_no_trace(tmp_path):
    with pytest.raises(
        StoreError, match=rf"^MRR501: cannot save .*/y/x: there is no folder {tmp_path}/y: make it first"
    ):
        save_trace(make_trace(5), tmp_path / "y" / "x")
    (tmp_path / "reply.json").write_text('{"choices": []}')
    with pytest.raises(
        StoreError, match=r"^MRR501: cannot load .*/reply.json: it is no safetensors file, and so no trace"
    ):
        load_trace(tmp_path / "reply.json")


def test_a_mapped_trace_is_the_file_of_its_time_and_a_loaded_one_a_copy(tmp_path):
    path = save_trace(make_trace(5), tmp_path / "x")
    mapped, loaded = map_trace(path), load_trace(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    replaced = path.rename(tmp_path / "y")
    save_trace(make_trace(5, seed=1), path)
    assert_same(mapped, make_trace(5))
    replaced.write_bytes(b"")  # the bytes of both
    assert_same(loaded, make_trace(5))


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for seed in (0, 1):  # a free name, and a file
        assert save_trace(make_trace(seed=seed), tmp_path / "link") == tmp_path / "link"
        assert (tmp_path / "link").is_symlink()
        assert_same(load_trace(tmp_path / "x"), make_trace(seed=seed))
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode, "as any new file"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_path_that_is_no_file_is_neither_replaced_nor_waited_for(tmp_path, make):
    path = tmp_path / "special"
    make(path)
    before = path.stat()
    for verb, act in (("save", lambda: save_trace(make_trace(), path)), ("load", lambda: load_trace(path))):
        with pytest.raises(StoreError, match=rf"^MRR501: cannot {verb} {path}: it is a (device|folder)"):
            act()
    assert path.stat().st_ino == before.st_ino


def test_more_metadata_than_safetensors_reads_is_not_written(tmp_path):
    trace = make_trace(1, sequence_lengths=(1,), sample_ids=("x" * 90_000_000,))
    with pytest.raises(StoreError, match=r"^MRR506: cannot save .* save fewer samples"):
        save_trace(trace, tmp_path / "x")
    assert os.listdir(tmp_path) == []
