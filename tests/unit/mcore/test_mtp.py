"""A multi-token-prediction layer stays live and is frozen in recomputes; in the chunk's forward or behind it."""

import pytest
import torch

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import (
    HIDDEN,
    ROWS,
    Chunk,
    as_map,
    bare,
    disturbed_backward,
    flips,
    live_maps,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
)

pytestmark = pytest.mark.version

OF_MTP = 100  # the watcher tells the two routers of layer number 1 apart by the number of the forward


class WithMtp(Chunk):
    """Decoder layers 1 and 2 of 2, and an MTP layer that takes what they return."""

    def __init__(self):
        from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

        super().__init__()
        self.config.num_layers, self.config.mtp_num_layers = 2, 1
        self.mtp = bare(MultiTokenPredictionLayer, layer_number=1, mtp_model_layer=self.layers[2])
        self.mtp.mtp_model_layer.router.layer_number = 1  # as later versions of Megatron-Core number it
        self.layers = self.layers[:2]
        self.behind = False  # whoever calls the chunk calls the MTP layer too

    def forward(self, input_ids, number=0):
        logits = super().forward(input_ids, number)
        return logits if self.behind else logits.sum() + self.predict(logits, number).sum()

    def predict(self, logits, number=0):
        hidden = logits[..., :HIDDEN].clone()
        hidden[..., -1] = OF_MTP + number
        return self.around(self.mtp.mtp_model_layer, hidden)

    @property
    def routers(self):
        return [layer.router for layer in (*self.layers, self.mtp.mtp_model_layer)]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("around", [plain, reentrant])
def test_an_mtp_layer_stays_live_and_its_recompute_is_frozen(around, behind):
    chunk, trace = WithMtp(), random_trace(8, 3)  # an engine may send routes of the MTP layer, too
    chunk.around = around
    live = live_maps(chunk)[1]  # of decoder layer 1 and of the MTP layer in turns
    chunk.behind = behind
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        session.microbatch(ROWS)
        output = chunk(tokens())
        disturbed_backward(chunk, output.sum() + chunk.predict(output).sum() if behind else output)
    for layer in (1, 2):
        assert torch.equal(seen[0, layer][0], as_map(trace.layer(layer)[ROWS.t().reshape(-1)]))
    assert torch.equal(seen[OF_MTP, 1][0], live[1])
    assert (num_recomputed(seen), flips(seen)) == (0 if around is plain else 3, 0)
    assert (session.report.routers, session.report.forwards, session.report.microbatches) == (3, 3, 1)
