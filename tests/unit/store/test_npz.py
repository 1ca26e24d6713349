"""RoutingTrace <-> npz files, also those that others made or damaged."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import RouterReplayError, StoreError, TraceError
from megatron_router_replay.store.npz import load_arrays, save_npz, trace_of_arrays
from tests.unit.store.store_traces import assert_same, full_trace, make_trace


@pytest.mark.parametrize(
    "trace",
    [
        make_trace(3),
        full_trace(6),
        full_trace(4, num_experts=300, layer_numbers=(1,)),
        make_trace(0, sequence_lengths=(), sample_ids=()),
        make_trace(2, layer_numbers=()),
    ],
    ids=repr,
)
def test_what_is_saved_is_loaded(tmp_path, trace):
    assert_same(trace_of_arrays(load_arrays(save_npz(trace, tmp_path / "x.npz"))), trace)


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=4), min_size=1, max_size=4))
def test_sample_ids_stay_as_they_are(tmp_path_factory, names):
    # numpy's own text drops zeros at the end, and refuses surrogates.
    trace = make_trace(len(names), sequence_lengths=(1,) * len(names), sample_ids=names)
    path = save_npz(trace, tmp_path_factory.mktemp("npz") / "x.npz")
    assert trace_of_arrays(load_arrays(path)).sample_ids == tuple(names)


def test_one_long_name_among_many_takes_its_own_room_only(tmp_path):
    names = ["x" * 10_000] + ["y"] * 999
    trace = make_trace(1000, sequence_lengths=(1,) * 1000, sample_ids=names)
    assert save_npz(trace, tmp_path / "x.npz").stat().st_size < 100_000  # 40 MB as numpy's text


def test_numpy_reads_it_and_files_of_numpy_are_read(tmp_path):
    trace = full_trace(6)
    with np.load(save_npz(trace, tmp_path / "x.npz"), allow_pickle=False) as content:
        values = {name: content[name] for name in content.files}
    assert values["topk_indices"].tolist() == trace.topk_indices.tolist()
    values["sample_ids"] = np.array(["a", "b"])  # as version 0.1 wrote them
    values["topk_indices"] = np.asfortranarray(values["topk_indices"].astype(">i4"))
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "y.npz", **values)
        again = trace_of_arrays(load_arrays(tmp_path / "y.npz"))
        assert again.topk_indices.tolist() == trace.topk_indices.tolist()
        assert again.sample_ids == ("a", "b")


def npy(shape, dtype="|u1", data=b""):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def archive(compression=zipfile.ZIP_DEFLATED, **members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name + ".npy", data)
    return content.getvalue()


BOMBS = {
    "a shape of a gigabyte": archive(topk_indices=npy((1 << 30,))),
    "a shape beyond 64 bits": archive(topk_indices=npy((1 << 40, 1 << 40))),
    "a negative shape": archive(topk_indices=npy((-1, -8))),
    "text of a gigabyte": archive(topk_indices=npy((1,), "<U250000000")),
    "text of no characters, a billion times": archive(topk_indices=npy((1 << 30,), "<U0")),
    "more bytes than the shape has": archive(topk_indices=npy((3,), data=b"abcd")),
    "objects": archive(topk_indices=npy((1,), "|O", b"x" * 8)),
    "a date": archive(topk_indices=npy((1,), "<M8[s]", b"x" * 8)),
    "no npy": archive(topk_indices=b"hello"),
    "nothing": b"",
    "no zip": b"PK\x03\x04 and so on",
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_promise_much_are_refused_in_little_memory(tmp_path, name):
    (tmp_path / "x.npz").write_bytes(BOMBS[name])
    assert len(BOMBS[name]) < 942
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"cannot read .*x\.npz"):
            load_arrays(tmp_path / "x.npz")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_size_that_only_the_directory_of_the_zip_claims_is_refused(tmp_path):
    good = archive(zipfile.ZIP_STORED, topk_indices=npy((3,), data=b"abc"))
    at = good.rindex(b"PK\x01\x02") + 24  # the uncompressed size in the central directory
    (tmp_path / "x.npz").write_bytes(good[:at] + (1 << 30).to_bytes(4, "little") + good[at + 4 :])
    with pytest.raises(StoreError, match=r"cannot hold 1 arrays of 1073741824 bytes"):
        load_arrays(tmp_path / "x.npz")


def test_an_array_that_a_flipped_bit_hides_is_missed(tmp_path):
    # The directory at the end has 46 bytes, a name and a comment for each member; no checksum covers the comment's length.
    path = save_npz(full_trace(6), tmp_path / "x.npz")
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2", data.rindex(b"token_ids.npy") - 46)
    following = data.index(b"PK\1\2", entry + 4)
    data[entry + 32] = 46 + len("weight_version.npy")
    assert data[following + 46 :].startswith(b"weight_version.npy")
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert "weight_version.npy" not in archive.namelist()  # Python's reader does not notice
    with pytest.raises(StoreError, match="its directory names"):
        load_arrays(path)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_files_are_refused_or_harmless(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("npz") / "x.npz"
    good = save_npz(full_trace(3), path).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "drop"]))
    if kind == "flip":
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :])
    else:
        path.write_bytes(good[:at] if kind == "cut" else good[:at] + good[at + 1 :])
    try:
        trace = trace_of_arrays(load_arrays(path))
    except RouterReplayError:
        return
    # Whatever zip and npy ignore (a date, padding) changes nothing.
    assert trace.topk_indices.tolist() == full_trace(3).topk_indices.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "no array num_experts"),
        ({"topk_indices": None}, "no array topk_indices"),
        ({"num_experts": np.array([8, 8])}, r"num_experts is no single integer, but int64 of shape \[2\]"),
        ({"num_experts": np.array(8.0)}, "num_experts is no single integer, but float64"),
        ({"sample_ids": np.frombuffer(b"[1]", np.uint8)}, "not a list of strings"),
        ({"sample_ids": np.frombuffer(b"{", np.uint8)}, "no JSON list of names"),
        ({"sample_ids": np.array([1000])}, "no JSON list of names"),
        ({"layer_numbers": np.array([1.0, 2.0, 3.0])}, "layer_numbers must be a list of integers"),
    ],
    ids=str,
)
def test_arrays_that_are_no_trace_are_refused(tmp_path, changes, message):
    arrays = load_arrays(save_npz(full_trace(3), tmp_path / "x.npz")) | changes
    with pytest.raises((StoreError, TraceError), match=message):
        trace_of_arrays({name: value for name, value in arrays.items() if value is not None})


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(StoreError, match="cannot save"):
        save_npz(full_trace(3), tmp_path / "missing" / "x.npz")
