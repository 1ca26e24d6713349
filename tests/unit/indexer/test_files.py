"""Files of positions: they come back as they were saved, or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from megatron_router_replay.errors import StoreError
from megatron_router_replay.indexer import PositionTrace, load_positions, save_positions
from megatron_router_replay.store import save_trace
from tests.unit.indexer.choices import choose
from tests.unit.store.store_traces import make_trace

TRACE = PositionTrace.from_positions(
    choose([*range(30)], num_layers=2, topk=4), positions_in_sample=range(30), layer_numbers=(2, 5), topk=4
)


def test_a_trace_comes_back_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "positions.safetensors"
    path.write_bytes(b"old")
    assert load_positions(save_positions(TRACE, path)) == TRACE
    nothing = PositionTrace.from_positions(
        torch.empty(0, 0, 4, dtype=torch.int32), positions_in_sample=[], layer_numbers=(), topk=4
    )
    assert load_positions(save_positions(nothing, path)) == nothing
    assert [each.name for each in tmp_path.iterdir()] == ["positions.safetensors"]


def test_every_byte_that_is_altered_is_noticed(tmp_path):
    path = save_positions(TRACE, tmp_path / "positions")
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for place in (*range(8, size, 7), *range(size, len(data), 11)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            # Blanks of the header may be altered without an effect.
            assert load_positions(path) == TRACE
        except StoreError as error:
            assert f"cannot load {path}" in str(error)  # noqa: PT017
        else:
            assert data[place : place + 1] == b" "


@pytest.mark.parametrize("size", [0, 7, 100, -8])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = save_positions(TRACE, tmp_path / "positions")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StoreError, match=r"MRR502: cannot load .*it is no file of positions, or truncated"):
        load_positions(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(StoreError, match="MRR501: cannot load"):
        load_positions(path)
    save_trace(make_trace(3), path)
    with pytest.raises(StoreError, match="MRR502: "):
        load_positions(path)
    save_file({"codes": TRACE.codes}, path)
    with pytest.raises(StoreError, match="MRR502: "):
        load_positions(path)
