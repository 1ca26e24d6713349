"""A trace file: its bytes, what is read of it, and that nothing which was altered is."""

import json
import os
import stat
import struct
import subprocess
import sys
import tracemalloc
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import load_trace, save_trace
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace import RoutingTrace
from tests.unit.store.store_traces import assert_same, assert_valid, full_trace, make_trace

# The format, byte for byte: two tokens, layers 1 and 3, top-2 of 4 experts; the second token has no route.
METADATA = (
    b'{"block_rows":16384,"has_token_ids":true,"has_weight_version":false,"layer_numbers":[1,3],"num_experts":4,'
    b'"num_tokens":2,"sample_ids":["a"],"sequence_lengths":[2],"topk":2,"version":1}'
)
TENSORS = {
    "token_ids": b"\x0b\x00\x00\x00\x0c\x00\x00\x00",
    "topk_indices.1": b"\x03\x01\x02\x03",
    "topk_indices.3": b"\x00\x02\x02\x03",
    "replay_mask": b"\x01\x00",
}
FIELDS = (
    b'"crc32":{"dtype":"U32","shape":[5],"data_offsets":[0,20]},'
    b'"token_ids":{"dtype":"I32","shape":[2],"data_offsets":[20,28]},'
    b'"topk_indices.1":{"dtype":"U8","shape":[2,2],"data_offsets":[28,32]},'
    b'"topk_indices.3":{"dtype":"U8","shape":[2,2],"data_offsets":[32,36]},'
    b'"replay_mask":{"dtype":"BOOL","shape":[2],"data_offsets":[36,38]}}'
)
# Layers 1 and 3, replay_mask, token_ids.
TABLE = struct.pack("<4I", 0x990C29FD, 0x89FF384A, 0x58C223BE, 0x729E7C87)


def pinned_trace() -> RoutingTrace:
    return RoutingTrace(
        topk_indices=[[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]],
        layer_numbers=(1, 3),
        num_experts=4,
        token_ids=[11, 12],
        sequence_lengths=(2,),
        sample_ids=("a",),
    )


def as_file(metadata: bytes, table: bytes, tensors: dict[str, bytes], fields: bytes = FIELDS) -> bytes:
    """A file whose first checksum fits."""
    quoted = metadata.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    header = b'{"__metadata__":{"megatron_router_replay.trace":"' + quoted + b'"},' + fields
    header += b" " * (-len(header) % 8)
    crc = struct.pack("<I", zlib.crc32(metadata + table))
    return struct.pack("<Q", len(header)) + header + crc + table + b"".join(tensors.values())


def pinned_bytes() -> bytes:
    return as_file(METADATA, TABLE, TENSORS)


def test_the_format_is_these_bytes(tmp_path):
    path = save_trace(pinned_trace(), tmp_path / "x.safetensors")
    assert path.read_bytes() == pinned_bytes()
    in_order = [TENSORS[name] for name in ("topk_indices.1", "topk_indices.3", "replay_mask", "token_ids")]
    assert [zlib.crc32(data) for data in in_order] == list(struct.unpack("<4I", TABLE))


def test_these_bytes_are_the_trace(tmp_path):
    (tmp_path / "x").write_bytes(pinned_bytes())
    assert_same(load_trace(tmp_path / "x"), pinned_trace())


@pytest.mark.parametrize("num_experts", [8, 300])
def test_the_safetensors_library_reads_the_file_and_writes_the_same_bytes(tmp_path, num_experts):
    trace = full_trace(9, num_experts=num_experts, layer_numbers=(2, 3, 20))
    path = save_trace(trace, tmp_path / "x.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, tmp_path / "again", metadata=file.metadata())
        assert json.loads(file.metadata()["megatron_router_replay.trace"])["num_tokens"] == 9
        for number in trace.layer_numbers:
            assert torch.equal(file.get_tensor(f"topk_indices.{number}"), trace.layer(number))
        assert torch.equal(file.get_tensor("replay_mask"), trace.replay_mask)
        assert torch.equal(file.get_tensor("token_ids"), trace.token_ids)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("layer_numbers", [(), (2, 5)])
@pytest.mark.parametrize("num_experts", [256, 257])
@pytest.mark.parametrize("num_tokens", [0, 1, 16383, 16384, 16385])
def test_a_trace_comes_back_as_it_was(tmp_path, num_tokens, num_experts, layer_numbers):
    trace = full_trace(num_tokens, num_experts=num_experts, layer_numbers=layer_numbers)
    assert_same(load_trace(save_trace(trace, tmp_path / "x")), trace)


def test_a_view_of_rows_and_layers_is_saved_as_what_it_shows(tmp_path):
    view = make_trace(20).select_layers([2, 7])[3:11]
    assert_same(load_trace(save_trace(view, tmp_path / "x")), view)


def places(data: bytes) -> tuple[int, dict[str, list[int]]]:
    """Where the tensors start, and each one's data_offsets from there."""
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    return 8 + length, {name: entry["data_offsets"] for name, entry in fields.items() if name != "__metadata__"}


def test_a_slice_reads_its_own_blocks_and_layers_only(tmp_path):
    trace = full_trace(5 * 16384, layer_numbers=tuple(range(1, 11)))
    path = save_trace(trace, tmp_path / "x")
    good = path.read_bytes()
    base, offsets = places(good)
    # Rows 16300..16499 of layers 4 and 9: the first two of five blocks of 16384 rows, two bytes a row.
    touched = {name: (base + offsets[name][0], 2 * 16384 * 2) for name in ("topk_indices.4", "topk_indices.9")}
    touched["replay_mask"] = (base + offsets["replay_mask"][0], 2 * 16384)
    touched |= {name: (base + offsets[name][0], 2 * 16384 * 4) for name in ("token_ids", "weight_version")}
    proven = base + offsets["crc32"][1]
    assert offsets["crc32"][0] == 0
    assert proven < 4000

    garbage = bytearray(byte ^ 0xFF for byte in good)
    for start, size in [(0, proven), *touched.values()]:
        garbage[start : start + size] = good[start : start + size]
    path.write_bytes(garbage)
    slices = {"layer_numbers": [4, 9], "rows": slice(16300, 16500)}
    assert_same(load_trace(path, **slices), trace.select_layers([4, 9])[16300:16500])
    with pytest.raises(StoreError, match=r"topk_indices\.5, rows 0\.\.16383, is wrong"):
        load_trace(path, layer_numbers=[5], rows=slice(0, 1))
    with pytest.raises(StoreError, match=r"rows 32768\.\.49151, is wrong"):
        load_trace(path, layer_numbers=[4], rows=slice(32768, 32769))
    for name, (start, size) in touched.items():
        for block in (0, 1):
            damaged = bytearray(garbage)
            damaged[start + block * size // 2 + 7] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=rf"{name}, rows {16384 * block}\.\.{16384 * block + 16383}, is wrong"):
                load_trace(path, **slices)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 5), (16380, 16390), (16384, 16900), (34999, 35000), (35000, 35000)]
)
def test_any_slice_is_the_slice_of_the_whole(tmp_path, start, stop):
    trace = full_trace(35000)
    path = save_trace(trace, tmp_path / "x")
    assert_same(load_trace(path, rows=slice(start, stop)), trace[start:stop])
    assert_same(load_trace(path, rows=slice(start, None)), trace[start:35000])
    assert_same(load_trace(path, rows=slice(None, stop)), trace[:stop])


def test_every_altered_byte_is_found_and_the_file_is_named(tmp_path):
    path = save_trace(full_trace(5), tmp_path / "of step 12")
    good = path.read_bytes()
    for position in range(len(good)):
        for flip in (1, 0x80):
            damaged = bytearray(good)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match="of step 12"):
                load_trace(path)


def test_every_truncated_file_is_found(tmp_path):
    path = save_trace(full_trace(5), tmp_path / "of step 12")
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(StoreError, match="of step 12"):
            load_trace(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(StoreError, match=f"it has {len(good) + 1} bytes, its header asks for {len(good)}"):
        load_trace(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\0" * 100, b"\xff" * 100, b"{}" * 20])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StoreError, match=r"cannot load .*x"):
        load_trace(tmp_path / "x")


def test_another_safetensors_file_is_refused(tmp_path):
    for metadata in ({"format": "pt"}, None, {}):
        save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors", metadata=metadata)
        with pytest.raises(StoreError, match=r"model\.safetensors: .* no trace file"):
            load_trace(tmp_path / "model.safetensors")


def test_a_missing_file_or_folder_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="nothing"):
        load_trace(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"cannot load .* it is a folder: TraceStore\(folder\).load_step\(step\)"):
        load_trace(tmp_path)
    with pytest.raises(StoreError, match=r"cannot save .*: there is no folder .*no folder: make it first\."):
        save_trace(make_trace(), tmp_path / "no folder" / "x")


def forged(metadata=METADATA, fields=FIELDS, **changes) -> bytes:
    """A file with correct checksums whose JSON, safetensors header or tensors' bytes were changed."""
    tensors = TENSORS | {name.replace("_1", ".1").replace("_3", ".3"): data for name, data in changes.items()}
    in_order = ["topk_indices.1", "topk_indices.3", "replay_mask", "token_ids"]
    table = struct.pack("<4I", *(zlib.crc32(tensors[name]) for name in in_order))
    return as_file(metadata, table, tensors, fields)


def changed(old: bytes, new: bytes) -> bytes:
    assert METADATA.count(old) == 1
    return METADATA.replace(old, new)


SHAPE_OF_LAYER_3 = b'"shape":[2,2],"data_offsets":[32,36]'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_indices_1": b"\x04\x01\x02\x03"}, "row 0, layer 1 .*outside 0..3"),
        ({"topk_indices_3": b"\x00\x02\x03\x03"}, "row 1, layer 3 .*named twice"),
        ({"replay_mask": b"\x01\x02"}, "replay_mask holds 2"),
        ({"metadata": changed(b'experts":4', b'experts":257')}, "not those that its metadata asks for"),
        ({"metadata": changed(b"[1,3]", b"[3,1]")}, "layer_numbers must increase"),
        ({"metadata": changed(b"[1,3]", b"[1,4]")}, "not those that its metadata asks for"),
        ({"metadata": changed(b"[1,3]", b"[1]")}, "not those that its metadata asks for"),
        ({"metadata": changed(b"[1,3]", str([*range(1, 65538)]).replace(" ", "").encode())}, "65537 layers are more"),
        ({"metadata": changed(b'topk":2', b'topk":1')}, "not those that its metadata asks for"),
        ({"metadata": changed(b'token_ids":true', b'token_ids":false')}, "not those that its metadata asks for"),
        ({"metadata": changed(b'version":false', b'version":true')}, "not those that its metadata asks for"),
        ({"metadata": changed(b"[2]", b"[3]")}, "add up to 3"),
        ({"metadata": changed(b"[2]", b"[x]")}, "no header of a trace file"),
        ({"metadata": changed(b"[2]", b"[2.0]")}, "no header of a trace file"),
        ({"metadata": changed(b"[2]", b'"2"')}, "no header of a trace file"),
        ({"metadata": changed(b'["a"]', b'["\xc3\xbc"]')}, "not as this package writes it"),
        ({"metadata": changed(b'version":1', b'version":2')}, "version 2; this package reads"),
        ({"metadata": changed(b'version":1', b'version":3')}, "no header of a trace file"),
        ({"metadata": changed(b'version":1', b'version":1.0')}, "not as this package writes it"),
        ({"metadata": changed(b'version":1', b'version":1,"x":1')}, "not as this package writes it"),
        ({"metadata": changed(b'"topk":2', b'"topk":2,"topk":2')}, "not as this package writes it"),
        ({"metadata": changed(b'"topk":2', b'"topk":true')}, "no header of a trace file"),
        ({"metadata": changed(b'"topk":2', b'"top":2')}, "no header of a trace file"),
        ({"metadata": changed(b'token_ids":true', b'token_ids":1')}, "has_token_ids=1 must be true or false"),
        ({"metadata": changed(b'rows":16384', b'rows":0')}, "block_rows=0"),
        ({"metadata": changed(b'rows":16384', b'rows":1')}, "not those that its metadata asks for"),
        ({"metadata": b"[]"}, "no header of a trace file"),
        ({"metadata": b"[" * 9000}, "no header of a trace file"),
        ({"metadata": b""}, "no header of a trace file"),
        ({"fields": FIELDS.replace(b'"U8"', b'"I8"')}, "not those that its metadata asks for"),
        ({"fields": FIELDS.replace(b'"U8"', b'"F8_E4M3"')}, "not those that its metadata asks for"),
        ({"fields": FIELDS.replace(b'"shape"', b'"shape" ')}, "not those that its metadata asks for"),
        ({"fields": FIELDS.replace(b"indices.3", b"indices.4")}, "not those that its metadata asks for"),
        ({"fields": FIELDS.replace(SHAPE_OF_LAYER_3, b'"shape":[4],"data_offsets":[32,36]')}, "not those that"),
        ({"fields": FIELDS.replace(SHAPE_OF_LAYER_3, b'"shape":[2,2],"data_offsets":[28,32]')}, "not those that"),
        ({"fields": FIELDS.replace(SHAPE_OF_LAYER_3, b'"shape":[2,2],"data_offsets":[32,37]')}, "not those that"),
        ({"fields": b"[" * 9000}, "not those that its metadata asks for"),
    ],
)
def test_a_forged_file_with_correct_checksums_cannot_make_an_invalid_trace(tmp_path, changes, message):
    (tmp_path / "x").write_bytes(forged(**changes))
    with pytest.raises(StoreError, match=rf"cannot load .*x: .*{message}"):
        load_trace(tmp_path / "x")


def test_the_forging_itself_makes_valid_files(tmp_path):
    (tmp_path / "x").write_bytes(forged())
    assert_same(load_trace(tmp_path / "x"), pinned_trace())
    (tmp_path / "x").write_bytes(forged(topk_indices_1=b"\x00\x01\x02\x03"))
    other = load_trace(tmp_path / "x")
    assert_valid(other)
    assert other.layer(1)[0].tolist() == [0, 1]


def test_a_file_that_claims_to_be_huge_allocates_nothing(tmp_path):
    metadata = METADATA.replace(b'tokens":2', b'tokens":900000000000000').replace(b"[2]", b"[900000000000000]")
    fields = FIELDS.replace(b"[2,2]", b"[900000000000000,2]").replace(b'"shape":[2]', b'"shape":[900000000000000]')
    wraps = FIELDS.replace(b"[2,2]", b"[9223372036854775808,2]")
    # The length of the header may be anything, and so may the offsets of a tensor without elements.
    beyond = FIELDS.replace(b'"shape":[2,2],"data_offsets":[32,36]', b'"shape":[0,2],"data_offsets":[99999,99999]')
    files = [forged(metadata), forged(metadata, fields), forged(fields=wraps), forged(fields=beyond)]
    files += [struct.pack("<Q", length) + pinned_bytes()[8:] for length in (2**63, 2**64 - 1, 10**8, 10**8 + 1)]
    tracemalloc.start()
    for data in files:
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(StoreError, match=r"cannot load .*x: it"):
            load_trace(tmp_path / "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_metadata_of_very_many_values_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "x").write_bytes(forged(b"[" + b"[]," * (3 << 20)))
    with pytest.raises(StoreError, match="holds more than 4194304 values"):
        load_trace(tmp_path / "x")
    # Outside of our JSON nothing is parsed that could grow.
    (tmp_path / "x").write_bytes(forged(fields=b"[" + b"[]," * (3 << 20)))
    with pytest.raises(StoreError, match="not those that its metadata asks for"):
        load_trace(tmp_path / "x")


@pytest.mark.slow
def test_metadata_that_could_not_be_read_again_is_not_written(tmp_path):
    name = "x" * 8_000_000
    trace = make_trace(2, sequence_lengths=(2,), sample_ids=(name,))
    with pytest.raises(StoreError, match=r"cannot save .*the header takes 8000\d\d\d bytes.* save fewer samples"):
        save_trace(trace, tmp_path / "x")
    assert os.listdir(tmp_path) == []
    # As many layers as a header may name, and nearly as long a name, are below what is read again.
    layers = tuple(range(900_000, 900_000 + (1 << 16)))
    values = {"sequence_lengths": (1,), "sample_ids": (name[:-1_000_000],)}
    trace = make_trace(1, layer_numbers=layers, num_experts=300, topk=1, **values)
    assert load_trace(save_trace(trace, tmp_path / "x"), layer_numbers=[900_001]).sample_ids == values["sample_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_numbers": [4]}, r"no layer_number 4; there are \[2, 3, 7\]"),
        ({"rows": slice(0, 8)}, "it has 7 tokens"),
        ({"rows": slice(-1, None)}, "it has 7 tokens"),
        ({"rows": slice(0, 4, 2)}, "step 1"),
        ({"rows": slice(4, 3)}, "start <= stop"),
    ],
)
def test_a_slice_that_the_file_does_not_have_raises(tmp_path, options, message):
    path = save_trace(make_trace(7), tmp_path / "x")
    with pytest.raises(StoreError, match=message):
        load_trace(path, **options)


def test_who_reads_the_old_file_while_it_is_replaced_reads_all_of_it(tmp_path):
    path = save_trace(make_trace(3), tmp_path / "x")
    reader = Reader.open(path)
    save_trace(make_trace(5), path)
    assert_same(reader.load(), make_trace(3))
    assert_same(load_trace(path), make_trace(5))


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path, there):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "x", tmp_path / "x"
    if there:
        target.write_bytes(b"old")
    link.symlink_to(target)
    assert save_trace(make_trace(), link) == link
    assert link.is_symlink()
    assert target.is_file()
    assert_same(load_trace(target), make_trace())
    assert os.listdir(target.parent) == ["x"]


def make_socket(path):
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, os.mkdir])
@pytest.mark.parametrize("through_a_link", [False, True])
def test_what_is_no_file_is_neither_replaced_nor_waited_for(tmp_path, make, through_a_link):
    path = tmp_path / "special"
    make(path)
    before = path.stat()
    if through_a_link:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    for verb, act in (("save", lambda: save_trace(make_trace(), path)), ("load", lambda: load_trace(path))):
        with pytest.raises(StoreError, match=rf"^MRR501: cannot {verb} {path}: it is (no file but|a folder)"):
            act()
    after = (tmp_path / "special").stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


def test_links_that_lead_to_each_other_are_refused(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(StoreError, match=r"cannot save .*a: .*symbolic links"):
        save_trace(make_trace(), tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_name_that_promises_a_different_format_is_refused(tmp_path):
    for name in ("x.pt", "x.PTH", "x.json", "x.npz"):
        with pytest.raises(StoreError, match=rf"cannot save .*{name}: .* name it x\.safetensors\."):
            save_trace(make_trace(), tmp_path / name)
    assert os.listdir(tmp_path) == []
    for name in ("x", "x.safetensors", "of step.12", "x.trace"):
        save_trace(make_trace(), tmp_path / name)


@pytest.mark.parametrize("topk", [1, 2, 3, 6, 8, 10])
@pytest.mark.parametrize("num_experts", [64, 300])
def test_several_blocks_come_back_for_any_width_of_a_route(tmp_path, topk, num_experts):
    trace = make_trace(2 * 16384 + 5, topk=topk, num_experts=num_experts)
    assert_same(load_trace(save_trace(trace, tmp_path / "x")), trace)
    assert_same(
        load_trace(tmp_path / "x", layer_numbers=[7], rows=slice(4000, 8194)), trace.select_layers([7])[4000:8194]
    )


def test_neither_saving_nor_loading_copies_the_routes_a_second_time(tmp_path):
    trace = make_trace(16 * 16384, layer_numbers=(1, 2, 3, 4), topk=4)
    path = save_trace(trace, tmp_path / "x")
    size = trace.topk_indices.nbytes
    for act, most in ((lambda: save_trace(trace, path), size / 4), (lambda: load_trace(path), size / 4)):
        tracemalloc.start()  # of Python and numpy; what is returned is torch's
        act()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's data is Linux's")
def test_loading_takes_the_memory_of_one_copy(tmp_path):
    # The kernel counts what torch allocates, too; pages of a mapped file are none of it.
    ids = torch.arange(8, dtype=torch.uint8).expand(16 * 16384, 48, 8)
    path = save_trace(RoutingTrace(topk_indices=ids, layer_numbers=tuple(range(1, 49)), num_experts=8), tmp_path / "x")
    save_trace(make_trace(2 * 16384), tmp_path / "small")
    script = (
        "import pathlib, resource, sys, torch, megatron_router_replay as mrr\n"
        "path, small, share = sys.argv[1:]\n"
        "torch.set_num_threads(2)\n"
        "mrr.load_trace(small)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "held = 1024 * int(status.split('VmData:')[1].split()[0])\n"
        "most = held + int(float(share) * pathlib.Path(path).stat().st_size)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (most, most))\n"
        "print(mrr.load_trace(path).num_tokens)\n"
    )
    run = [sys.executable, "-c", script, str(path), str(tmp_path / "small")]
    assert subprocess.run([*run, "1.3"], check=True, capture_output=True).stdout.split() == [b"262144"]
    failed = subprocess.run([*run, "0.9"], check=False, capture_output=True)  # the limit tells one copy from none
    assert failed.returncode
    assert b"allocate" in failed.stderr


def test_an_invalid_id_in_a_later_block_is_named_by_its_row(tmp_path):
    indices = torch.tensor([0, 1]).expand(35000, 1, 2).clone()
    path = save_trace(RoutingTrace(topk_indices=indices, layer_numbers=(1,), num_experts=4), tmp_path / "x")
    data = bytearray(path.read_bytes())
    base, offsets = places(bytes(data))
    first = base + offsets["topk_indices.1"][0]
    data[first + 2 * 33000] = 1
    crc = base + offsets["crc32"][0]
    table = bytearray(data[crc + 4 : base + offsets["crc32"][1]])
    struct.pack_into("<I", table, 4 * 2, zlib.crc32(data[first + 2 * 32768 : first + 2 * 35000]))
    metadata = json.loads(data[8:base])["__metadata__"]["megatron_router_replay.trace"].encode()
    data[crc : crc + 4 + len(table)] = struct.pack("<I", zlib.crc32(metadata + table)) + table
    path.write_bytes(data)
    for rows in (None, slice(32900, 33100)):
        with pytest.raises(StoreError, match=r"row 33000, layer 1 .*named twice"):
            load_trace(path, rows=rows)


def test_a_trace_can_be_saved_while_the_interpreter_ends(tmp_path):
    script = (
        "import atexit, sys, torch, megatron_router_replay as mrr\n"
        "torch.set_num_threads(2)\n"
        "ids = torch.tensor([0, 1]).expand(35000, 1, 2)\n"
        "trace = mrr.RoutingTrace(topk_indices=ids, layer_numbers=(1,), num_experts=4)\n"
        "atexit.register(lambda: mrr.save_trace(trace, sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], check=True)
    assert load_trace(tmp_path / "x").num_tokens == 35000


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    save_trace(make_trace(), tmp_path / "x")
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_a_giant_header_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "x"
    header = b'{"a":{"dtype":"U8","shape":[' + b"1," * 10_000_000 + b'1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(StoreError, match=r"x: it is no trace file, .* the first 8 ask for a header of 200000\d\d\."):
        load_trace(path)
