import io
import os
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay import RouterReplayError
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import file as file_module
from megatron_router_replay.store import load_trace, save_trace
from megatron_router_replay.store.file import read_trace, write_trace
from megatron_router_replay.trace import RoutingTrace
from tests.unit.store.store_traces import assert_same, assert_valid, full_trace, make_trace

# The format, byte for byte: two tokens, layers 1 and 3, top-2 of 4 experts; the second token has no route.
HEADER = (
    b'{"__metadata__":{"format":"megatron_router_replay.trace","version":"1","num_tokens":"2","topk":"2",'
    b'"num_experts":"4","block_rows":"4096","layer_numbers":"[1,3]","sequence_lengths":"[2]","sample_ids":"[\\"a\\"]"},'
    b'"crc32":{"dtype":"U32","shape":[5],"data_offsets":[0,20]},'
    b'"token_ids":{"dtype":"I32","shape":[2],"data_offsets":[20,28]},'
    b'"topk_indices.1":{"dtype":"U8","shape":[2,2],"data_offsets":[28,32]},'
    b'"topk_indices.3":{"dtype":"U8","shape":[2,2],"data_offsets":[32,36]},'
    b'"replay_mask":{"dtype":"BOOL","shape":[2],"data_offsets":[36,38]}} '
)
TENSORS = [b"\x0b\x00\x00\x00\x0c\x00\x00\x00", b"\x03\x01\x02\x03", b"\x00\x02\x02\x03", b"\x01\x00"]
TABLE = struct.pack("<4I", 0x729E7C87, 0x990C29FD, 0x89FF384A, 0x58C223BE)


def pinned_trace() -> RoutingTrace:
    return RoutingTrace(
        topk_indices=[[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]],
        layer_numbers=(1, 3),
        num_experts=4,
        token_ids=[11, 12],
        sequence_lengths=(2,),
        sample_ids=("a",),
    )


def pinned_bytes() -> bytes:
    crc = struct.pack("<I", zlib.crc32(HEADER + TABLE))
    return struct.pack("<Q", len(HEADER)) + HEADER + crc + TABLE + b"".join(TENSORS)


def test_the_format_is_these_bytes(tmp_path):
    path = save_trace(pinned_trace(), tmp_path / "x.safetensors")
    assert path.read_bytes() == pinned_bytes()
    assert [zlib.crc32(data) for data in TENSORS] == list(struct.unpack("<4I", TABLE))


def test_these_bytes_are_the_trace(tmp_path):
    (tmp_path / "x").write_bytes(pinned_bytes())
    assert_same(load_trace(tmp_path / "x"), pinned_trace())


def test_any_safetensors_reader_opens_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="reads the file with the safetensors package")
    trace = full_trace(9, num_experts=300)
    path = save_trace(trace, tmp_path / "x.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "megatron_router_replay.trace"
        for number in trace.layer_numbers:
            assert torch.equal(file.get_tensor(f"topk_indices.{number}"), trace.layer(number))
        assert torch.equal(file.get_tensor("replay_mask"), trace.replay_mask)
        assert torch.equal(file.get_tensor("token_ids"), trace.token_ids)


@pytest.mark.parametrize("num_experts", [8, 256, 257, 512])
@pytest.mark.parametrize("num_tokens", [0, 1, 4095, 4096, 4097, 9000])
def test_a_trace_comes_back_as_it_was(tmp_path, num_tokens, num_experts):
    trace = full_trace(num_tokens, num_experts=num_experts, layer_numbers=(2, 5))
    assert_same(load_trace(save_trace(trace, tmp_path / "x")), trace)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    layer_numbers=st.sets(st.integers(1, 99), max_size=4).map(sorted).map(tuple),
    num_experts=st.sampled_from([3, 256, 300, 32768]),
    topk=st.integers(1, 3),
    names=st.lists(st.text(max_size=5), max_size=3),
    extras=st.booleans(),
)
def test_any_trace_comes_back_as_it_was(num_tokens, layer_numbers, num_experts, topk, names, extras):
    values = {}
    if extras and names:
        lengths = (num_tokens, *[0] * (len(names) - 1))
        values = {"sequence_lengths": lengths, "sample_ids": tuple(names), "weight_version": -3}
    trace = make_trace(num_tokens, layer_numbers=layer_numbers, num_experts=num_experts, topk=topk, **values)
    file = io.BytesIO()
    write_trace(trace, file)
    assert_same(read_trace(file), trace)


def test_a_view_of_rows_and_layers_is_saved_as_what_it_shows(tmp_path):
    view = make_trace(20).select_layers([2, 7]).slice_rows(3, 11)
    assert_same(load_trace(save_trace(view, tmp_path / "x")), view)


class CountingFile(io.BytesIO):
    """Counts what is read, so that a test can say that nothing else was."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, size: int = -1) -> bytes:
        at = self.tell()
        data = super().read(size)
        self.ranges.append((at, at + len(data)))
        return data


def test_a_slice_reads_its_own_blocks_and_layers_only():
    trace = full_trace(5 * 4096, layer_numbers=tuple(range(1, 11)))
    written = io.BytesIO()
    write_trace(trace, written)
    file = CountingFile(written.getvalue())
    part = read_trace(file, layer_numbers=[4, 9], rows=slice(4000, 4200))
    assert_same(part, trace.select_layers([4, 9]).slice_rows(4000, 4200))
    # Two blocks of 4096 rows: two layers of two bytes a row, token_ids and weight_version of four, one mask byte.
    data = sum(stop - start for start, stop in file.ranges[3:])
    assert data == 2 * 4096 * (2 * 2 + 4 + 4 + 1)
    assert sum(stop - start for start, stop in file.ranges[:3]) < 4000


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 5), (4090, 4100), (4096, 8192), (8999, 9000), (9000, 9000)])
def test_any_slice_is_the_slice_of_the_whole(tmp_path, start, stop):
    trace = full_trace(9000)
    path = save_trace(trace, tmp_path / "x")
    assert_same(load_trace(path, rows=slice(start, stop)), trace.slice_rows(start, stop))
    assert_same(load_trace(path, rows=slice(start, None)), trace.slice_rows(start, 9000))


def test_a_slice_is_proven_without_the_rest(tmp_path):
    trace = full_trace(9000)
    path = save_trace(trace, tmp_path / "x")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last row's mask
    path.write_bytes(data)
    assert_same(load_trace(path, rows=slice(0, 8192)), trace.slice_rows(0, 8192))
    with pytest.raises(StoreError, match=r"replay_mask, rows 8192\.\.8999, is wrong"):
        load_trace(path, rows=slice(8999, 9000))


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
    with pytest.raises(StoreError, match="truncated or altered"):
        load_trace(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\0" * 100, b"\xff" * 100, b"{}" * 20])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StoreError, match=r"cannot load .*x"):
        load_trace(tmp_path / "x")


def test_another_safetensors_file_is_refused(tmp_path):
    save_file = pytest.importorskip("safetensors.torch", reason="writes with the safetensors package").save_file
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match="its format is 'pt'"):
        load_trace(tmp_path / "model.safetensors")


def test_a_missing_file_or_folder_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="nothing"):
        load_trace(tmp_path / "nothing")
    with pytest.raises(StoreError, match="cannot save"):
        save_trace(make_trace(), tmp_path / "no folder" / "x")


def forged(change) -> io.BytesIO:
    """A file with correct checksums whose content `change` rewrote: bytes of the tensors behind crc32, by name."""
    written = io.BytesIO()
    write_trace(pinned_trace(), written)
    names = ["token_ids", "topk_indices.1", "topk_indices.3", "replay_mask"]
    tensors = dict(zip(names, TENSORS))
    header, tensors = change(HEADER, tensors)
    table = struct.pack("<4I", *(zlib.crc32(data) for data in tensors.values()))
    crc = struct.pack("<I", zlib.crc32(header + table))
    return io.BytesIO(struct.pack("<Q", len(header)) + header + crc + table + b"".join(tensors.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t: (h, t | {"topk_indices.1": b"\x04\x01\x02\x03"}), "row 0, layer 1 .*outside 0..3"),
        (lambda h, t: (h, t | {"topk_indices.3": b"\x00\x02\x03\x03"}), "row 1, layer 3 .*named twice"),
        (lambda h, t: (h, t | {"replay_mask": b"\x01\x02"}), "replay_mask holds 2"),
        (lambda h, t: (h.replace(b'experts":"4"', b'experts":"0"'), t), "num_experts=0"),
        (lambda h, t: (h.replace(b'experts":"4"', b'experts":"1"'), t), "topk=2 must lie in 1..num_experts=1"),
        (lambda h, t: (h.replace(b'"[1,3]"', b'"[3,1]"'), t), "layer_numbers must increase"),
        (lambda h, t: (h.replace(b'"[1,3]"', b'"[0,3]"'), t), "layer_numbers must increase"),
        (lambda h, t: (h.replace(b'"[1,3]"', b'"[1,4]"'), t), "not those that its metadata asks for"),
        (lambda h, t: (h.replace(b'"[2]"', b'"[3]"'), t), "add up to 3"),
        (lambda h, t: (h.replace(b'"[2]"', b'"[x]"'), t), "no header of a trace file"),
        (lambda h, t: (h.replace(b'version":"1"', b'version":"2"'), t), "version '2'; this package reads"),
        (lambda h, t: (h.replace(b'rows":"4096"', b'rows":"0000"'), t), "block_rows=0"),
        (lambda h, t: (h.replace(b'tokens":"2"', b'tokens":"9"'), t), "add up to 2"),
        (lambda h, t: (h.replace(b'"U8"', b'"I8"'), t), "not those that its metadata asks for"),
        (lambda h, t: (b"[" * len(h), t), "no header of a trace file"),
    ],
)
def test_a_forged_file_with_correct_checksums_cannot_make_an_invalid_trace(change, message):
    with pytest.raises(StoreError, match=message):
        read_trace(forged(change))


def test_the_forging_itself_makes_valid_files():
    assert_same(read_trace(forged(lambda header, tensors: (header, tensors))), pinned_trace())
    other = read_trace(forged(lambda h, t: (h, t | {"topk_indices.1": b"\x00\x01\x02\x03"})))
    assert_valid(other)
    assert other.layer(1)[0].tolist() == [0, 1]


def test_a_header_that_claims_a_huge_file_allocates_nothing():
    header = HEADER.replace(b'tokens":"2"', b'tokens":"900000000000000"').replace(b"[2]", b"[900000000000000]", 1)
    file = io.BytesIO(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(StoreError):
        read_trace(file)
    with pytest.raises(StoreError, match="truncated"):
        read_trace(io.BytesIO(struct.pack("<Q", 2**63) + HEADER))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_numbers": [4]}, r"no layer \[4\]; it has \[2, 3, 7\]"),
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


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = save_trace(make_trace(3), tmp_path / "x")
    before = path.read_bytes()

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(StoreError, match=r"cannot save .*x: .*No space left"):
        save_trace(make_trace(5), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_who_reads_the_old_file_while_it_is_replaced_reads_all_of_it(tmp_path):
    path = save_trace(make_trace(3), tmp_path / "x")
    with path.open("rb") as file:
        save_trace(make_trace(5), path)
        assert_same(read_trace(file), make_trace(3))
    assert_same(load_trace(path), make_trace(5))


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    save_trace(make_trace(), tmp_path / "x")
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_only_store_errors_reach_the_caller():
    assert issubclass(StoreError, RouterReplayError)
    assert file_module.load_trace is load_trace
