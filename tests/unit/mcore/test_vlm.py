"""Multimodal models: rows by the outermost forward's tokens, laid out as the language model gets its hidden states."""

import copy
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.mcore.batches.hidden_states import Alignment
from tests.unit.mcore.test_follow import DRAWN, alike, ids, oracle, trace_of, wrong
from tests.unit.mcore.tiny_chunk import disturb, reentrant
from tests.unit.mcore.tiny_vlm import IMAGE, PLACES, PacksItself, TinyLanguageModel, TinyVLM, packed

I = IMAGE  # noqa: E741
A, B, C = [5, I, I, 7, 8], [5, 6, 9], [4, I, 4, 1, I, I, 2]
"""Two texts with one and two images, and one without."""
ROWS_A, ROWS_B, ROWS_C = list(range(5)), list(range(5, 8)), list(range(8, 15))
DECLARED: dict[str, Any] = {"padding_token_ids": [0]}
Call = dict[str, Any]


def keep(*rows: list[int], dtype: Any = torch.int64) -> Tensor:
    return torch.tensor(rows).to(dtype)


def check(model: Any, tokens: list[list[int]], rows: list[list[int]], call: Call, **options: Any) -> Any:
    """Compare one forward and its recompute with these rows, [b, s] of the language model's hidden states, -1: live."""
    trace = alike([A, B, C])
    inner = model if isinstance(model, PacksItself) else model.language_model
    inner.around = reentrant
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN, **options) as session:
        loss = model(ids(*tokens), 0, **call).square().sum()
        disturb(model)
        loss.backward()
    assert {len(each) for each in calls.values()} == {2}, "each layer ran twice"
    assert wrong(calls, trace, {0: rows}) == 0
    return session.report


PADDED = [[*A, 0, 0], [*B, 0, 0, 0, 0], C]
LEFT = [[0, 0, *A], [0, 0, 0, 0, *B], C]
MASK, LEFT_MASK = ([[int(token != 0) for token in row] for row in rows] for rows in (PADDED, LEFT))
IN_A_ROW = [[*ROWS_A, *ROWS_B, *ROWS_C]]
FOUND: dict[str, tuple[Any, list[list[int]], list[list[int]], Call, Call]] = {
    # model, tokens, rows of the hidden states, arguments of the forward, options
    "in place, declared padding": (
        TinyVLM,
        PADDED,
        [[*ROWS_A, -1, -1], [*ROWS_B, -1, -1, -1, -1], ROWS_C],
        {},
        DECLARED,
    ),
    "in place, a mask": (
        TinyVLM,
        LEFT,
        [[-1, -1, *ROWS_A], [-1, -1, -1, -1, *ROWS_B], ROWS_C],
        {"attention_mask": keep(*LEFT_MASK)},
        {},
    ),
    "packed inside": (
        TinyVLM,
        PADDED,
        IN_A_ROW,
        {"attention_mask": keep(*MASK, dtype=torch.bool), "packed_seq_params": packed(0, 5, 8, 15)},
        {},
    ),
    "padded on the left, packed inside": (
        TinyVLM,
        LEFT,
        IN_A_ROW,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 5, 8, 15)},
        DECLARED,
    ),
    "packed inside, the language model gets the ids": (
        lambda: TinyVLM(gives_ids=True),
        LEFT,
        IN_A_ROW,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 5, 8, 15)},
        {},
    ),
    "one row, packed inside": (
        TinyVLM,
        [[0, 0, *A]],
        [ROWS_A],
        {"attention_mask": keep([0, 0, 1, 1, 1, 1, 1]), "packed_seq_params": packed(0, 5)},
        {},
    ),
    "packed outside": (TinyVLM, [[*A, *B, *C]], IN_A_ROW, {"packed_seq_params": packed(0, 5, 8, 15)}, {}),
    "packed outside, lengths known": (
        TinyVLM,
        [[*A, 0, *B, 0, *C]],
        [[*ROWS_A, -1, *ROWS_B, -1, *ROWS_C]],
        {"packed_seq_params": packed(0, 6, 10, 17, unpadded=[0, 5, 8, 15])},
        {},
    ),
    "cut on the right, and padding that the mask calls valid": (
        TinyVLM,
        [[*A[:3], 0, 0], [*B, 0, 0]],
        [[*ROWS_A[:3], -1, *ROWS_B]],
        {"attention_mask": keep([1, 1, 1, 1, 0], [1, 1, 1, 0, 0]), "packed_seq_params": packed(0, 4, 7)},
        DECLARED,
    ),
    "packed by a mask that no forward gets": (
        lambda: packs_by_tokens(),
        PADDED,
        IN_A_ROW,
        {"packed_seq_params": packed(0, 5, 8, 15)},
        DECLARED,
    ),
    "padding alone": (
        TinyVLM,
        [[0, 0, 0], B],
        [ROWS_B],
        {"attention_mask": keep([0, 0, 0], [1, 1, 1]), "packed_seq_params": packed(0, 0, 3)},
        {},
    ),
    "packs itself": (
        PacksItself,
        LEFT,
        IN_A_ROW,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 5, 8, 15)},
        {},
    ),
    "packs itself, to multiples of 16": (
        PacksItself,
        LEFT,
        [[*ROWS_A, *[-1] * 11, *ROWS_B, *[-1] * 13, *ROWS_C, *[-1] * 9]],
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 16, 32, 48)},
        {},
    ),
    "packs itself, and gets it packed": (
        PacksItself,
        [[*A, *B, *C]],
        IN_A_ROW,
        {"packed_seq_params": packed(0, 5, 8, 15)},
        {},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_hidden_states_get_the_rows_of_the_tokens_they_were_made_of(name: str) -> None:
    build, tokens, rows, call, options = FOUND[name]
    report = check(build(), tokens, rows, call, **options)
    assert report.rows_padding == sum(row == -1 for each in rows for row in each)


def arranged(change: Any) -> Any:
    """A wrapper that changes embeddings [b, s, h] and ids [b, s] in this way after it has arranged them."""

    def build(**options: Any) -> TinyVLM:
        model = TinyVLM(**options)

        def arrange(self: TinyVLM, *args: Any) -> tuple[Tensor, Tensor]:
            hidden, tokens = TinyVLM.arrange(self, *args)
            return change(hidden), change(tokens)

        model.arrange = MethodType(arrange, model)  # type: ignore[method-assign]
        return model

    return build


def expand(values: Tensor) -> Tensor:
    """The second position becomes PLACES of them."""
    return torch.cat([values[:, :1], values[:, 1:2].repeat_interleave(PLACES, dim=1), values[:, 2:]], dim=1)


def drop(values: Tensor) -> Tensor:
    return torch.cat([values[:, :1], values[:, 2:]], dim=1)


def drop_and_fill(values: Tensor) -> Tensor:
    return torch.cat([drop(values), torch.zeros_like(values[:, :1])], dim=1)


def packs_by_tokens() -> TinyVLM:
    """A wrapper that makes its own mask."""
    model = TinyVLM()

    def arrange(self: TinyVLM, embedded: Tensor, tokens: Tensor, _: Any, packed: Any) -> tuple[Tensor, Tensor]:
        return TinyVLM.arrange(self, embedded, tokens, tokens != 0, packed)

    model.arrange = MethodType(arrange, model)  # type: ignore[method-assign]
    return model


def put_in_front(values: Tensor) -> Tensor:
    """One more position, as of a class token."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)


def on_two_ranks() -> Any:
    """A model whose rows are filled to multiples of two."""
    return arranged(put_in_front)(tensor_model_parallel_size=2, num_attention_heads=2)


RAISES: dict[str, tuple[Any, list[list[int]], Call, str]] = {
    "five positions for one token": (arranged(expand), [A, A], {}, r"MRR201: .*tokens, and \[9, 9\] hidden states"),
    "a token is dropped": (arranged(drop), [A, A], {}, r"MRR201: .*sequences of \[5, 5\] tokens, and \[4, 4\]"),
    "five positions for one token, packed": (
        arranged(expand),
        [[*A, *B]],
        {"packed_seq_params": packed(0, 9, 12)},
        "MRR201",
    ),
    "five positions for one token, packed inside": (
        arranged(expand),
        PADDED,
        {"attention_mask": keep(*MASK), "packed_seq_params": packed(0, 5, 8, 15)},
        r"MRR201: .*\[5, 3, 7, 0\] tokens, and \[5, 3, 7, 4\]",
    ),
    "a token is dropped, packed, with a rest of the row": (
        arranged(drop),
        [[*A, *B, 0, 0, 0]],
        {"packed_seq_params": packed(0, 5, 8)},
        r"MRR201: .*\[5, 3, 3\] tokens, and \[5, 3, 2\]",
    ),
    "one of equal tokens is dropped, and the language model gets the ids": (
        lambda: arranged(drop_and_fill)(gives_ids=True),
        [A[:3]],
        {},
        "MRR203",
    ),
    "samples are exchanged, and the language model gets the ids": (
        lambda: arranged(lambda values: values.flip(0))(gives_ids=True),
        [A, [*B, 0, 0]],
        {},
        "MRR203: .*moves, drops or exchanges",
    ),
    "a token is dropped, and the language model gets the ids": (
        lambda: arranged(drop_and_fill)(gives_ids=True),
        [A, [*B, 0, 0]],
        {},
        "MRR203",
    ),
    "fewer packed sequences than rows": (
        TinyVLM,
        LEFT,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 8, 15)},
        "MRR201: .*input_ids of 3 sequences and computes 2",
    ),
    "a mask of other lengths than packing": (
        TinyVLM,
        [[*A, 0], [0, 0, 0, *B]],
        {"attention_mask": keep([1] * 5 + [0], [0] * 3 + [1] * 3), "packed_seq_params": packed(0, 6, 9)},
        r"MRR201: .*\[5, 3\] tokens, and \[6, 3\]",
    ),
    "packs itself, to what is no multiple": (
        PacksItself,
        LEFT,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 16, 31, 47)},
        r"MRR201: .*\[5, 3, 7\] tokens, and \[16, 15, 16\]",
    ),
    "packs itself, to a multiple of 16 too many": (
        PacksItself,
        LEFT,
        {"attention_mask": keep(*LEFT_MASK), "packed_seq_params": packed(0, 16, 48, 64)},
        r"MRR201: .*\[5, 3, 7\] tokens, and \[16, 32, 16\]",
    ),
    "lengths without padding that are not the mask's": (
        TinyVLM,
        [[*A, 0], [*B, 0, 0, 0]],
        {
            "attention_mask": keep([1] * 5 + [0], [1] * 3 + [0] * 3),
            "packed_seq_params": packed(0, 6, 10, unpadded=[0, 4, 7]),
        },
        r"MRR201: .*\[5, 3\] tokens, and \[4, 3\]",
    ),
    "a mask with a gap": (
        TinyVLM,
        [A, [*B, 0, 0]],
        {"attention_mask": keep([1, 0, 1, 1, 1], [1, 1, 1, 0, 0]), "packed_seq_params": packed(0, 4, 7)},
        "MRR207: .*between tokens",
    ),
    "a loss mask": (
        TinyVLM,
        [A, [*B, 0, 0]],
        {"attention_mask": keep([1, 1, 0, 0, 0], [1, 1, 0, 0, 0])},
        r"MRR207: .*next 3 tokens are the sample's own",
    ),
    "one position more than an even number": (on_two_ranks, [A[:4]], {}, r"MRR201: .*\[4\] tokens, and \[5\] hidden"),
    "one position more in each of two rows, of which one is filled": (
        on_two_ranks,
        [[*A, 0, 0], C],
        {"packed_seq_params": packed(0, 6, 14), "attention_mask": keep([1] * 5 + [0] * 2, [1] * 6 + [0])},
        r"MRR201: .*\[5, 6",
    ),
    "a mask over a whole sample": (
        TinyVLM,
        [A, [*B, 0, 0]],
        {"attention_mask": keep([0] * 5, [1, 1, 1, 0, 0])},
        r"MRR207: .*input_ids\[0, 0\], sequence 0: a mask calls all of .*the first 5 of sample 0, which would be",
    ),
    "an inverted mask": (
        TinyVLM,
        [[*A, 0, 0], [0, 0, 0, 0, *B]],
        {"attention_mask": keep([0] * 5 + [1] * 2, [1] * 4 + [0] * 3)},
        r"MRR207: .*input_ids\[0, 0\], sequence 0: a mask calls .*1 more",
    ),
    "other tokens": (TinyVLM, [[*A[:3], 9, 8, 9]], {}, "MRR206"),
    "padded on the left, packed by a mask that no forward gets": (
        lambda: packs_by_tokens(),
        [[0, *A], [0, 0, 0, *B]],
        {"packed_seq_params": packed(0, 5, 8)},
        "MRR20[16]",
    ),
}


@pytest.mark.parametrize("name", RAISES)
@pytest.mark.parametrize("declared", [True, False])
def test_what_is_laid_out_as_nothing_known_raises_in_its_forward(name: str, declared: bool) -> None:
    build, tokens, call, match = RAISES[name]
    model = build()
    with (
        pytest.raises(RouterReplayError, match=match if declared else "MRR20"),
        mrr.replay(model, alike([A, B, C]), **DRAWN, **(DECLARED if declared else {})),
    ):
        model(ids(*tokens), 0, **call)


@pytest.mark.parametrize(
    ("number", "size", "explained"),
    [
        ([5, 8], [5, 8], True),
        ([5, 8], [6, 8], True),
        ([5, 8], [6, 9], False),
        ([5, 8], [7, 8], False),
        ([5, 8], [5, 10], False),
        ([5, 8], [16, 16], True),
        ([5, 8], [6, 16], False),
        ([5, 8], [16, 240], True),  # a row of 256
        ([5, 8], [6, 250], True),
        ([5, 8], [16, 24], False),
        ([5, 8], [16, 496], False),  # one more row than is needed
        ([5, 8], [4, 8], False),
        ([], [], True),
    ],
)
def test_sequences_are_filled_to_the_next_multiple_and_the_last_one_to_that_of_the_row(
    number: list[int], size: list[int], explained: bool
) -> None:
    assert Alignment((2, 16), 256).explains(np.array(number), np.array(size)) == explained


# ---- forwards, one after another, in one another, and those of other models
def test_a_forward_that_cannot_begin_does_not_end_the_incomplete_one_before_it() -> None:
    model = PacksItself()
    decode = model.decode
    with (
        pytest.raises(RouterReplayError, match=r"micro-batch 0: its layer 3 was not forwarded"),
        mrr.replay(model, alike([A]), **DRAWN),
    ):
        model.decode = MethodType(lambda self, hidden: self.layers[1](self.layers[0](hidden)), model)  # type: ignore[method-assign]
        model(ids(A), 0)
        model.decode = decode  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(RouterReplayError, match=r"MRR407: .*no forward of its layer 3 came"):
                model(ids(A), 1)


def test_a_forward_that_fails_around_the_language_model_leaves_nothing() -> None:
    model, trace = TinyVLM(), alike([A, B, C])

    def fail(*_: Any) -> Any:
        raise ArithmeticError("vision")

    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        model.arrange, arrange = fail, model.arrange  # type: ignore[method-assign]
        with pytest.raises(ArithmeticError):
            model(ids(C), 0)
        model.arrange = arrange  # type: ignore[method-assign]
        with pytest.raises(RouterReplayError, match=r"MRR424: .*nor did a model around it"):
            model.language_model(None, decoder_input=torch.zeros(7, 1, 8))
        model(ids(A), 1)
    assert wrong(calls, trace, {1: [ROWS_A]}) == 0
    assert session.report.microbatches == 1
    assert "forward" not in vars(model)


def test_direct_forwards_count_and_several_may_wait_for_their_backward() -> None:
    model, trace = TinyVLM(), alike([A, B, C])
    model.language_model.around = reentrant
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        losses = [
            model.forward(ids(A), 0).sum(),
            model(ids(C), 1).sum(),
            model.forward(ids(A, [*B, 0, 0]), 2, keep([1] * 5, [1, 1, 1, 0, 0])).sum(),
        ]
        disturb(model)
        for loss in reversed(losses):
            loss.backward()
    assert wrong(calls, trace, {0: [ROWS_A], 1: [ROWS_C], 2: [ROWS_A, [*ROWS_B, -1, -1]]}) == 0
    assert session.report.microbatches == 3


def test_a_copy_of_the_model_is_not_under_the_session() -> None:
    model, trace = TinyVLM(), alike([A, B, C])
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN):
        model(ids(A), 0)
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not copied(ids([9, 9]), 5).any()
    # The hooks of the oracle were copied, too.
    assert wrong(calls, trace, {0: [ROWS_A], 5: None}) == 0
    assert not copied(ids([9, 9]), 5).any()


def test_a_critic_of_the_same_kind_is_not_under_the_session_even_inside_the_actor() -> None:
    model, critic, trace = TinyVLM(), TinyVLM(seed=4), alike([A, B, C])

    def arrange(self: TinyVLM, *args: Any) -> Any:
        critic(ids([9, 9, 9]), 7)
        return TinyVLM.arrange(self, *args)

    model.arrange = MethodType(arrange, model)  # type: ignore[method-assign]
    with oracle(model) as calls, oracle(critic) as live, mrr.replay(model, trace, **DRAWN):
        model(ids(A), 0)
    assert wrong(calls, trace, {0: [ROWS_A]}) == 0
    assert wrong(live, trace, {7: None}) == 0


def test_a_language_model_that_two_models_share_takes_tokens_of_the_one_with_the_session() -> None:
    actor, critic = TinyVLM(), TinyVLM()
    critic.language_model = actor.language_model
    with (
        pytest.raises(RouterReplayError, match="MRR424"),
        mrr.replay(actor, alike([A, B, C]), **DRAWN),
    ):
        actor(ids(A), 0)
        critic(ids(B), 1)


def test_a_language_model_that_runs_twice_in_one_forward_raises() -> None:
    class Twice(TinyVLM):
        def forward(self, input_ids: Tensor, number: int = 0) -> Tensor:  # type: ignore[override]
            super().forward(input_ids, number)
            return self.language_model(None, decoder_input=torch.zeros(5, 1, 8), number=number + 1)

    model = Twice()
    with pytest.raises(RouterReplayError, match=r"MRR407: .*ran twice"), mrr.replay(model, alike([A, B, C]), **DRAWN):
        model(ids(A), 0)


def test_a_forward_in_a_forward_has_tokens_of_its_own() -> None:
    """A model that scores other tokens before its own; each takes the rows of the innermost forward."""
    model, trace = TinyVLM(), alike([A, B, C])

    def arrange(self: TinyVLM, *args: Any) -> Any:
        if args[1].shape[1] == len(A):
            self(ids(B), 1)
        return TinyVLM.arrange(self, *args)

    model.arrange = MethodType(arrange, model)  # type: ignore[method-assign]
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        model(ids(A), 0)
    assert wrong(calls, trace, {0: [ROWS_A], 1: [ROWS_B]}) == 0
    assert session.report.microbatches == 2


def test_paused_forwards_of_the_whole_model_are_live() -> None:
    model, trace = TinyVLM(), alike([A, B, C])
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        with session.paused():
            model(ids([9, 9, 9]), 3)
        model(ids(A), 0)
    assert wrong(calls, trace, {0: [ROWS_A], 3: None}) == 0


def test_a_text_forward_whose_language_model_embeds_its_own_tokens_takes_these() -> None:
    class Text(TinyVLM):
        def forward(self, input_ids: Tensor, number: int = 0) -> Tensor:  # type: ignore[override]
            output: Tensor = self.language_model(input_ids.flip(0), number=number)
            return output

    model, trace = Text(), alike([A, B, C])
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN, **DECLARED):
        model(ids(A, [*B, 0, 0]), 0)
    assert wrong(calls, trace, {0: [[*ROWS_B, -1, -1], ROWS_A]}) == 0


def test_rows_by_hand_are_of_what_the_language_model_gets() -> None:
    model, trace = arranged(expand)(), trace_of([[5, I, 8]])
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        rows, tokens = torch.tensor([[0, 1, 1, 1, 1, 1, 2]]), torch.tensor([[5, I, I, I, I, I, 8]])
        session.microbatch(rows, model, token_ids=tokens)
        model(ids([5, I, 8]), 0)
    assert wrong(calls, trace, {0: [[0, 1, 1, 1, 1, 1, 2]]}) == 0


def test_exchanged_samples_of_one_length_are_told_by_agreement() -> None:
    """No forward shows them where the language model gets embeddings alone; the live router does, at the session's end."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(1, 30, (8, 64), generator=generator)
    model = TinyVLM()
    with mrr.record(model, padding_token_ids=[]) as recording:
        model(batch, 0)
    trace = recording.trace()
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == batch.flatten().tolist()
    with mrr.replay(model, trace):
        model(batch.flip(0), 1)
    model.arrange = MethodType(lambda self, *args: (args[0].flip(0), args[1]), model)  # type: ignore[method-assign]
    with pytest.raises(RouterReplayError, match="MRR419"), mrr.replay(model, trace):
        model(batch, 2)


def test_two_language_models_in_one_name_both() -> None:
    class Omni(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thinker, self.talker = TinyVLM(), TinyLanguageModel(seed=3)
            self.config = self.thinker.config

        def forward(self, input_ids: Tensor) -> Tensor:
            self.talker(ids([9, 9]), number=8)
            output: Tensor = self.thinker(input_ids)
            return output

    model, trace = Omni(), alike([A, B, C])
    match = r"MRR403: Omni has 2 language models with routers, in thinker.*talker.*model\.thinker"
    for begin in (
        lambda: mrr.replay(model, trace, **DRAWN),
        lambda: mrr.record(model),
        lambda: mrr.freeze_recompute(model),
    ):
        with pytest.raises(RouterReplayError, match=match):
            begin()
    with oracle(model.thinker) as calls, mrr.replay(model.thinker, trace, **DRAWN):
        model(ids(A))
    assert wrong(calls, trace, {0: [ROWS_A]}) == 0


def test_a_schedule_plan_around_the_language_model_takes_the_outer_tokens() -> None:
    class Planned(TinyLanguageModel):
        def build_schedule_plan(self, input_ids: Any, decoder_input: Tensor, number: int) -> Any:
            return lambda: TinyLanguageModel.forward(self, None, decoder_input=decoder_input, number=number)

    class Plans(TinyVLM):
        def build_schedule_plan(self, input_ids: Tensor, number: int) -> Any:
            embedded = self.language_model.embedding[input_ids].transpose(0, 1)
            return self.language_model.build_schedule_plan(None, decoder_input=embedded, number=number)

    model, trace = Plans(), alike([A, B, C])
    model.language_model.__class__ = Planned
    with oracle(model) as calls, mrr.replay(model, trace, **DRAWN) as session:
        model.build_schedule_plan(ids(C), number=0)()
        model.build_schedule_plan(ids(A), number=1)()
    assert wrong(calls, trace, {0: [ROWS_C], 1: [ROWS_A]}) == 0
    assert session.report.microbatches == 2


def test_a_wrapped_model_in_a_critic_is_found_at_any_depth() -> None:
    class ValueHead(nn.Module):
        """Gets ids and calls the multimodal model, without a config."""

        def __init__(self, module: TinyVLM) -> None:
            super().__init__()
            self.module = module

        def forward(self, input_ids: Tensor, number: int) -> Tensor:
            output: Tensor = self.module(input_ids, number)
            return output

    model, trace = TinyVLM(), alike([A, B, C])
    around = ValueHead(model)
    with oracle(model) as calls, mrr.replay(around, trace, **DRAWN):
        around(ids(A), 0)
    assert wrong(calls, trace, {0: [ROWS_A]}) == 0


def test_tokens_of_another_layout_are_not_compared_with_rows_by_hand() -> None:
    """A trainer may pass padded input_ids together with the packed hidden states that it made of them."""
    model, trace = TinyVLM(), alike([A, B, C])
    with oracle(model) as calls, mrr.replay(model.language_model, trace, **DRAWN) as session:
        session.microbatch(torch.tensor([ROWS_A + ROWS_B]))
        model.language_model(ids(A, [*B, 0, 0]), decoder_input=torch.zeros(8, 1, 8))
    assert wrong(calls, trace, {0: [[*ROWS_A, *ROWS_B]]}) == 0
    assert session.report.rows_replayed == 6  # the last token of a sample has no route
