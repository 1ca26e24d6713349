"""How a trainer's container could route wrongly with every check green: each raises, and names the sample."""

import pytest
import torch

from megatron_router_replay.engines import ModelRoutingInfo, row_check
from megatron_router_replay.errors import LayoutError, PayloadError
from megatron_router_replay.trainers import take_routes
from tests.unit.trainers.batches import (
    INFO,
    LENGTHS,
    assert_exact,
    attention_mask,
    engine_routes,
    nested,
    padded,
    token_ids,
    with_row,
)


def replaced(i, part, samples=None):
    samples = engine_routes() if samples is None else samples
    return [*samples[:i], part, *samples[i + 1 :]]


def random_routes(*, rows=None, layers=10, topk=2):
    """[rows or T - 1, layers, topk] of each sample."""
    lengths = [length - 1 for length in LENGTHS] if rows is None else [rows] * 3
    return [torch.rand(length, layers, 16).argsort(dim=2)[:, :, :topk] for length in lengths]


LATE = [torch.cat([torch.zeros(1, 10, 2, dtype=torch.int64), part]) for part in engine_routes()]
LEFT, RIGHT = (attention_mask(side=side) for side in ("left", "right"))
ONES = [torch.ones(5), torch.ones(1), torch.ones(7)]
REFUSED = {
    **{
        f"{rows} rows": (
            {"routed_experts": replaced(2, random_routes(rows=rows)[2])},
            f"sample 2 has {rows} rows of routes for 8",
        )
        for rows in (0, 5, 9)
    },
    "a sample too few": ({"routed_experts": engine_routes()[:2]}, "hold 2 samples, the tokens 3"),
    "a padded sample too few": (
        {"routed_experts": padded(engine_routes())[:2], "attention_mask": RIGHT},
        "padded batch of 3 samples",
    ),
    "no sample": ({"routed_experts": [], "lengths": []}, "hold no sample"),
    # A trainer that shifts routes like labels: [filler, r0, r1, ...], as many rows as tokens.
    "a row in front": (
        {"routed_experts": LATE},
        "sample 0 has as many rows of routes as tokens, and the last one is a route",
    ),
    "a row in front, live": ({"routed_experts": LATE, "missing": "live"}, "the last one is a route"),
    **{
        f"padded on the {side}, tokens on another side, {missing}": (
            {"routed_experts": padded(part, side=side), "attention_mask": mask, "missing": missing},
            "sample 0",
        )
        for side, part, mask in (("right", engine_routes(), LEFT), ("left", with_row(engine_routes(), 0), RIGHT))
        for missing in ("raise", "live")
    },
    "an inverted mask": (
        {"routed_experts": padded(with_row(engine_routes(), 0)), "attention_mask": 1 - RIGHT, "missing": "live"},
        "sample 0",
    ),
    "padding in front, other positions": (
        {"routed_experts": padded(engine_routes(), size=12, side="left"), "attention_mask": LEFT},
        "which row is whose cannot be told",
    ),
    "routes end before the sample": (
        {"routed_experts": padded([part[:5] for part in engine_routes()], size=5)},
        "sample 2 has 8 tokens, routed_experts end 3 tokens before it",
    ),
    **{
        f"{layers} layers": (
            {"routed_experts": random_routes(layers=layers)},
            f"have {layers} layers, the model has 10, 9 of them MoE",
        )
        for layers in (8, 11)
    },
    "top-3": ({"routed_experts": random_routes(topk=3)}, "have 3 experts a token, the model's topk is 2"),
    **{
        f"layers {numbers}": ({"layer_numbers": [*numbers, *range(3, 11)]}, "do not name 10 columns")
        for numbers in ([], [2, 1], [1, 1], [-1, 2])
    },
    "tokens nowhere": ({"lengths": None}, "is not said: give tokens=, attention_mask= or lengths="),
    "tokens said twice": ({"lengths": LENGTHS, "attention_mask": RIGHT}, "give one of them"),
    "a mask of another size": (
        {"tokens": padded(token_ids()), "attention_mask": attention_mask(size=8)},
        r"tokens are \[3, 9\], attention_mask \[3, 8\]",
    ),
    "other lengths": ({"tokens": nested(token_ids()), "lengths": [5, 2, 8]}, "lengths .* are not those of the tokens"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(3, 1, 9, 9)}, "attention_mask must be"),
    "one packed row": ({"tokens": torch.cat(token_ids())}, "Of one packed row"),
    "a mask of nested tokens": ({"tokens": nested(token_ids()), "attention_mask": RIGHT}, "attention_mask"),
    **{
        f"has_route {number}": ({"has_route": has_route}, "has_route")
        for number, has_route in enumerate(([4, 0], [6, 0, 7], ONES, torch.ones(3, 9)))
    },
}
"""What is given in place of an engine's routes and of the lengths -> what the error says."""


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(given, message):
    where = {} if {"tokens", "attention_mask", "lengths"} & set(given) else {"lengths": LENGTHS}
    with pytest.raises(LayoutError, match=message):
        take_routes(**{"routed_experts": engine_routes(), "model": INFO, **where, **given})


@pytest.mark.parametrize("filler", [0, 5])
def test_a_row_in_front_is_found_although_the_last_two_tokens_have_one_route(filler):
    """[filler, r0, ..., r6] with r5 == r6, as of one token twice: no copy that fills up, for the rows are one too late."""
    routes = engine_routes()[2]
    routes[6] = routes[5]
    shifted = torch.cat([torch.full((1, 10, 2), filler), routes])
    with pytest.raises(LayoutError, match="the last one is a route"):
        take_routes([shifted], INFO, lengths=[8], missing="live")


@pytest.mark.parametrize("filler", [0, -1, [0, 1], [5, 3]], ids=str)
def test_late_rows_are_told_by_filler_in_front_and_a_route_at_the_end(filler):
    """NeMo-RL's recipe: nothing else tells a shift where samples may have been cut after they were generated."""
    late = [torch.cat([torch.tensor(filler).expand(1, 10, 2), part]) for part in engine_routes()]
    recipe = {"model": INFO, "lengths": LENGTHS, "missing": "live", "last_row": "unchecked"}
    with pytest.raises(LayoutError, match=r"sample 0 has filler in its first row.* one too late"):
        take_routes(late, **recipe)
    assert (
        take_routes(late, **recipe, has_route=[torch.arange(t) > 0 for t in LENGTHS]).num_absent == 2
    )  # of a single token, it is the last
    cut = [
        part[:4] for part in (engine_routes()[0], engine_routes()[2])
    ]  # the last row is a route, and the first one, too
    assert take_routes(cut, INFO, lengths=[4, 4], last_row="unchecked").trace.replay_mask.all()


def test_a_last_row_that_is_no_copy_raises_where_the_trainer_is_said_to_copy():
    routes = torch.rand(8, 10, 16).argsort(dim=2)[:, :, :2]
    routes[7], routes[7, 9] = routes[6], routes[6, 9].flip(0)
    for rows, length in ((routes, 8), (routes[:1], 1)):
        with pytest.raises(LayoutError, match="the last one is a route"):
            take_routes([rows], INFO, lengths=[length], last_row="copied")


def test_zeros_are_lost_data_and_not_expert_zero():
    samples = engine_routes()
    samples[2][4:] = 0
    with pytest.raises(
        PayloadError, match=r"sample 2: 27 routes are all zero.* rows 4\.\.6; first: row 4, layer_number 2"
    ):
        take_routes(samples, INFO, lengths=LENGTHS)
    samples = engine_routes()
    samples[2][4, 8] = 3
    with pytest.raises(PayloadError, match=r"sample 2: 1 routes name an expert twice, in layers \[9\], row 4"):
        take_routes(samples, INFO, lengths=LENGTHS)


def test_filler_in_the_middle_of_a_sample_is_no_route():
    samples = engine_routes()
    samples[2][2:4, 1:] = -1
    with pytest.raises(PayloadError, match=r"sample 2: 2 rows 2\.\.3 are -1"):
        take_routes(samples, INFO, lengths=LENGTHS)


def test_in_a_model_of_few_layers_the_same_ids_in_each_are_believed():
    info = ModelRoutingInfo(num_layers=2, moe_layer_numbers=(1, 2), num_experts=16, topk=2)
    routes = torch.tensor([[[0, 1], [0, 1]], [[4, 5], [4, 5]], [[2, 3], [7, 9]]])
    trace = take_routes([routes], info, lengths=[4]).trace
    assert trace.replay_mask.tolist() == [True, True, True, False]


def test_an_id_that_no_expert_has_raises_also_where_missing_routes_are_live():
    samples = engine_routes()
    samples[2][4, 3, 1] = 16
    with pytest.raises(PayloadError, match=r"sample 2: row 4, layer 4 .* outside 0\.\.15.*of another model"):
        take_routes(samples, INFO, lengths=LENGTHS, missing="live")
    samples[2][4, 3, 1] = -1  # a row is -1 altogether or not at all
    with pytest.raises(PayloadError, match="sample 2: row 4, layer 4"):
        take_routes(samples, INFO, lengths=LENGTHS, missing="live")


def test_a_dtype_that_cannot_hold_the_experts_has_wrapped_them():
    info = ModelRoutingInfo(num_layers=10, moe_layer_numbers=tuple(range(1, 11)), num_experts=512, topk=2)
    wrapped = [(part + 300).to(torch.uint8) for part in engine_routes()]
    with pytest.raises(PayloadError, match="sample 0: ids are uint8, which cannot hold the ids of 512"):
        take_routes(wrapped, info, lengths=LENGTHS)


def test_a_minus_one_that_was_cast_to_uint8_raises():
    samples = engine_routes()
    samples[0][2] = -1
    with pytest.raises(PayloadError, match=r"sample 0: row 2, layer 2 .*\[255, 255\]"):
        take_routes([part.to(torch.uint8) for part in samples], INFO, lengths=LENGTHS, missing="live")


def test_layers_in_front_and_filler_behind_are_found_in_the_dense_column():
    """vLLM 0.21 with first_k_dense_replace: ten columns, of which the first nine are the MoE layers."""
    shifted = [torch.cat([part[:, 1:], part[:, :1]], dim=1) for part in engine_routes()]
    with pytest.raises((LayoutError, PayloadError), match="sample 0"):
        take_routes(shifted, INFO, lengths=LENGTHS)
    ids_on_dense = engine_routes()  # as SGLang's qwen3_moe sends them
    for part in ids_on_dense:
        part[:, 0] = torch.tensor([4, 2])
    with pytest.raises(LayoutError, match=r"sample 0: column 0 .* row 0 holds \[4, 2\] there"):
        take_routes(ids_on_dense, INFO, lengths=LENGTHS)
    take_routes(ids_on_dense, INFO, lengths=LENGTHS, layer_numbers=[0, *range(2, 11)])


def test_arguments_that_mean_nothing_raise():
    for options in ({"last_row": "lve"}, {"missing": "ignore"}):
        with pytest.raises(LayoutError, match="missing is 'raise' or 'live'"):
            take_routes(engine_routes(), INFO, lengths=LENGTHS, **options)
    with pytest.raises(LayoutError, match="must be integers, got float32"):
        take_routes([part.float() for part in engine_routes()], INFO, lengths=LENGTHS)
    with pytest.raises(LayoutError, match="must be integers, got NoneType"):
        take_routes(None, INFO, lengths=LENGTHS)
    with pytest.raises(LayoutError, match="weight_version"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=[1, 2])
    with pytest.raises(LayoutError, match="with last_row='replayed' there is one a token"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, last_row="replayed")
    with pytest.raises((LayoutError, PayloadError), match="sample 0"):
        take_routes(with_row(engine_routes(), 0), INFO, lengths=LENGTHS, last_row="replayed")


def test_all_layers_are_checked_whatever_this_rank_keeps():
    """Else one pipeline stage would raise and the others wait for it."""
    samples = engine_routes(moe_only=True)
    samples[0][3, 8] = 0
    for kept in ([2, 3, 4, 5, 6, 7, 8, 9, 10], [*range(2, 10), 10]):
        with pytest.raises(PayloadError, match=r"all zero, in layers \[10\], row 3"):
            take_routes(samples, INFO, lengths=LENGTHS, layer_numbers=kept)


@pytest.mark.parametrize("rows_of_a_block", [1, 3, 4])
def test_a_sample_of_several_blocks_is_read_as_one(monkeypatch, rows_of_a_block):
    monkeypatch.setattr(row_check, "_BLOCK_BYTES", rows_of_a_block * 10 * 2 * 8 + 1)
    assert_exact(take_routes(engine_routes(), INFO, lengths=LENGTHS).trace, engine_routes())
    samples = engine_routes()
    samples[2][5, 3] = 7
    with pytest.raises(PayloadError, match=r"sample 2: 1 routes name an expert twice, in layers \[4\], row 5"):
        take_routes(samples, INFO, lengths=LENGTHS)
    taken = take_routes(samples, INFO, lengths=LENGTHS, missing="live")
    assert taken.trace.replay_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 5 + [False, True, False]
    assert (taken.num_absent, taken.num_lost) == (0, 1)
    samples[2][5] = -1
    taken = take_routes(samples, INFO, lengths=LENGTHS, missing="live", has_route=[5, 1, 7])
    assert taken.trace.replay_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 5 + [False, True, False]
    assert (taken.num_absent, taken.num_lost) == (1, 0)
    samples[2][5, 3, 1] = 16
    with pytest.raises(PayloadError, match=r"sample 2: row 5, layer 2 .*-1"):
        take_routes(samples, INFO, lengths=LENGTHS, missing="live")


def few_layers(num_layers):
    return ModelRoutingInfo(
        num_layers=num_layers, moe_layer_numbers=tuple(range(1, num_layers + 1)), num_experts=16, topk=2
    )


@pytest.mark.parametrize(
    ("last", "is_route"),
    [
        ([[3, 1]], True),
        ([[0, 1]], False),
        ([[0, 0]], False),
        ([[-1, -1]], False),
        ([[3, 1], [3, 2]], True),
        ([[3, 1], [3, 1]], False),
        ([[3, 1], [2, 2]], False),
    ],
)
def test_the_last_row_of_a_model_of_one_or_two_layers(last, is_route):
    routes = torch.tensor([[[4, 5], [6, 7]], [[8, 9], [0, 1]], [[5, 2], [9, 3]]])[:, : len(last)]
    given = {"model": few_layers(len(last)), "lengths": [4], "missing": "live"}
    rows = torch.cat([routes, torch.tensor([last])])
    if is_route:
        with pytest.raises(LayoutError, match="the last one is a route"):
            take_routes([rows], **given)
        return
    trace = take_routes([rows], **given).trace
    assert trace.replay_mask.tolist() == [True, True, True, False]
    assert torch.equal(trace.topk_indices[:3].long(), routes)


def test_a_route_behind_other_padding_is_found():
    """Position 7 of sample 0 alone: five tokens, and filler at 5, 6 and 8."""
    batch = padded(with_row(engine_routes(), 0))
    batch[0, 7] = engine_routes()[2][0]
    with pytest.raises(LayoutError, match="sample 0 has routes on 1 positions that hold no token"):
        take_routes(batch, INFO, attention_mask=attention_mask())
    for filler in ([2, 2], [-1, 4]):  # in one layer only: of an expert twice, or with a -1, it is no route
        batch[0, 7, 5] = torch.tensor(filler)
        assert_exact(take_routes(batch, INFO, attention_mask=attention_mask()).trace, engine_routes())


def test_a_copy_behind_one_row():
    routes = engine_routes()[0][:1]
    taken = take_routes([torch.cat([routes, routes])], INFO, lengths=[2], last_row="copied")
    assert taken.trace.replay_mask.tolist() == [True, False]
    assert torch.equal(taken.trace.topk_indices[:1].long(), routes[:, 1:])


def test_a_dense_layer_of_minus_ones_is_filler_and_of_ones_is_not():
    samples = engine_routes()
    for part in samples:
        part[:, 0] = -1  # as sglang-jax sends it
    assert_exact(take_routes(samples, INFO, lengths=LENGTHS).trace, engine_routes())
    for part in samples:
        part[:, 0] = 1
    with pytest.raises(LayoutError, match="column 0 of the layer axis is a dense layer of the model"):
        take_routes(samples, INFO, lengths=LENGTHS)
