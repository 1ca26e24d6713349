"""The seal: every damaged row is told, every sound one passes, in each dtype that a trainer may carry, on both devices."""

import pytest
import torch

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trace import seal
from tests.support.soft_gpu import SoftGpu
from tests.support.workers import GlooWorkers

SHAPES = [
    # layers, topk, experts: each width of an id, and where it changes; rows that end in a word and that do not
    (48, 8, 128),
    (5, 4, 64),
    (3, 2, 8),
    (6, 1, 4),
    (4, 1, 255),
    (4, 1, 256),
    (7, 8, 256),
    (2, 2, 300),
    (12, 8, 512),
    (3, 22, 512),
    (2, 5, 128),
]
CARRIERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def rows_of(num_rows, layers, topk, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    routes = torch.rand(num_rows, layers, experts, generator=generator).argsort(2)[:, :, :topk]
    return routes, torch.randperm(150_000, generator=generator)[:num_rows]


def carried(sealed):
    return [sealed.to(dtype) for dtype in CARRIERS if dtype.itemsize >= sealed.dtype.itemsize]


def reference(row, token, experts):
    """The format read aloud, in Python's own integers."""
    layers, topk = len(row), len(row[0])

    def mixed(number):
        z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    width = 1 if experts + (topk == 1) <= 256 else 2
    data = b"".join(int(i).to_bytes(width, "little") for ids in row for i in ids)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = mixed(1 << 63 | experts << 40 | layers << 20 | topk)
    total = (total + sum(word * (mixed(i) | 1) for i, word in enumerate(words))) % 2**64
    count = max(1, {1: 5, 2: 3, 3: 2, 4: 2}.get(topk, 1)) * topk
    bits = 8 * min(7, count - 1)
    stored = (total >> 64 - bits) ^ (token % 2**24)
    return [0xB0 + width, *stored.to_bytes(7, "little"), *[0] * count][:count]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_seal_is_the_format_read_aloud(shape):
    routes, tokens = rows_of(20, *shape)
    tokens[:2] = torch.tensor([-200, 2**24 + 5])
    sealed = seal.stamp(routes, tokens, num_experts=shape[2])
    assert torch.equal(sealed[:, : shape[0]].long(), routes)
    assert sealed.dtype is (torch.uint8 if shape[2] + (shape[1] == 1) <= 256 else torch.int16)
    for row, ids, token in zip(sealed[:, shape[0] :].flatten(1).tolist(), routes.tolist(), tokens.tolist()):
        assert row == reference(ids, token, shape[2])


def test_the_seal_is_these_values():
    sealed = seal.stamp(torch.tensor([[[3, 1, 0, 7]], [[-1] * 4]]), torch.tensor([17, 18]), num_experts=8)
    assert sealed.tolist() == [
        [[3, 1, 0, 7], [177, 90, 203, 247], [108, 211, 168, 50]],
        [[255] * 4] * 3,
    ]


DAMAGE = {
    "another token": lambda rows, tokens, experts: (rows, tokens.roll(1)),
    "a token that differs in one bit": lambda rows, tokens, experts: (rows, tokens ^ 1 << 17),
    "rows one too late": lambda rows, tokens, experts: (rows.roll(1, 0), tokens),
    "another row's routes under this seal": lambda rows, tokens, experts: (
        _ids(rows, lambda ids: ids.roll(1, 0)),
        tokens,
    ),
    "the first layers exchanged": lambda rows, tokens, experts: (
        _ids(rows, lambda ids: ids[:, _exchange(ids)]),
        tokens,
    ),
    "layers shifted": lambda rows, tokens, experts: (_ids(rows, lambda ids: ids.roll(1, 1)), tokens),
    "an id changed": lambda rows, tokens, experts: (
        _ids(rows, lambda ids: _one(ids, (ids[0, 0, 0].long() + 1) % experts)),
        tokens,
    ),
    "an id that a cast hides": lambda rows, tokens, experts: (
        _ids(rows, lambda ids: _one(ids, ids[:, -1, -1] + 256)),
        tokens,
    ),
    "-1 in one layer": lambda rows, tokens, experts: (_ids(rows, lambda ids: _one(ids, -1)), tokens),
    "columns turned": lambda rows, tokens, experts: (_ids(rows, lambda ids: ids.roll(1, 2)), tokens),
    "the seal's first value": lambda rows, tokens, experts: (_seal(rows, 0), tokens),
    "the seal's last value": lambda rows, tokens, experts: (_seal(rows, 4), tokens),
}


def _ids(rows, change):
    layers = rows.shape[1] - seal.seal_layers(rows.shape[2])
    return torch.cat([change(rows[:, :layers].clone()), rows[:, layers:]], 1)


def _one(ids, value):
    ids[:, -1, -1] = value
    return ids


def _exchange(ids):
    return [1, 0, *range(2, ids.shape[1])]


def _seal(rows, value):
    flat = rows.clone().flatten(1)
    flat[:, -seal.seal_layers(rows.shape[2]) * rows.shape[2] + value] ^= 4
    return flat.view(rows.shape)


def told(rows, tokens, experts):
    return seal.prove(rows, num_experts=experts).of_other_tokens(tokens)


@pytest.mark.parametrize("num_rows", [200, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_damaged_row_is_told_and_every_sound_one_passes(shape, num_rows):
    routes, tokens = rows_of(num_rows, *shape)
    damaged = 0
    for rows in carried(seal.stamp(routes, tokens, num_experts=shape[2])):
        proved = seal.prove(rows, num_experts=shape[2])
        assert not (proved.of_other_tokens(tokens) | proved.absent).any()
        assert torch.equal(proved.ids.long(), routes)
        for name, change in DAMAGE.items():
            if rows.dtype is torch.uint8 and name in ("an id that a cast hides", "-1 in one layer"):
                continue
            others, ids = change(rows, tokens, shape[2])
            differ = (others != rows).flatten(1).any(1) | (ids != tokens)
            assert torch.equal(told(others, ids, shape[2]), differ), (name, rows.dtype)
            damaged += int(differ.sum())
    assert damaged > num_rows * 10


@pytest.fixture(scope="module")
def gpu_worker():
    with GlooWorkers(1) as workers:
        yield workers


def on_a_gpu(shapes):
    with SoftGpu() as gpu:
        for layers, topk, experts in shapes:
            routes, tokens = rows_of(30, layers, topk, experts)
            routes[3] = -1
            on_host = seal.stamp(routes, tokens, num_experts=experts, dtype=torch.int16)
            there, ids = routes.to("cuda"), tokens.to("cuda")
            with gpu.logged() as log:
                sealed = seal.stamp(there, ids, num_experts=experts, dtype=torch.int16)
                proved = seal.prove(sealed, num_experts=experts, filler=range(topk))
                wrong = proved.of_other_tokens(ids.roll(1))
            assert (log.waits, log.pageable) == ([], [])
            expected = seal.prove(on_host, num_experts=experts)
            assert torch.equal(sealed.cpu(), on_host)
            for name in ("ids", "absent", "broken"):
                assert torch.equal(getattr(proved, name).cpu(), getattr(expected, name))
            assert torch.equal(wrong.cpu(), expected.of_other_tokens(tokens.roll(1)))


@pytest.mark.slow
def test_a_gpu_seals_and_proves_the_same_without_a_wait(gpu_worker):
    gpu_worker.run(on_a_gpu, [SHAPES[i] for i in (3, 8)])


INFO = ModelRoutingInfo(num_layers=3, moe_layer_numbers=(2, 3), num_experts=8, topk=2)
ROUTES = torch.tensor([[[0, 0], [1, 2], [3, 4]], [[0, 0], [5, 6], [7, 0]]])
TOKENS = torch.tensor([17, 18])
LEGAL = {
    # a change of ROUTES, options -> which of the two rows have a route
    "dense layers of zeros": (lambda r: r, {"num_experts": 8}, [True, True]),
    "dense layers, by the model": (lambda r: r, {"model": INFO}, [True, True]),
    "dense layers of -1": (lambda r: _put(r, (slice(None), 0), -1), {"model": INFO}, [True, True]),
    "dense layers of 255 in uint8": (lambda r: _put(r, (slice(None), 0), -1).byte(), {"model": INFO}, [True, True]),
    "dense layers of 255, model not known": (lambda r: _put(r, (1, 0), -1).byte(), {"num_experts": 8}, [True, True]),
    "a dense layer in one row alone": (lambda r: _put(r, (1, 1), 0), {"num_experts": 8}, [True, True]),
    "MoE layers alone": (lambda r: r[:, 1:], {"model": INFO}, [True, True]),
    "a row of -1": (lambda r: _put(r, 0, -1), {"num_experts": 8}, [False, True]),
    "a row of -1, by the model": (lambda r: _put(r, 0, -1), {"model": INFO}, [False, True]),
    "a row of 255": (lambda r: _put(r, 0, -1).byte(), {"num_experts": 8}, [False, True]),
    "all rows of -1": (lambda r: r * 0 - 1, {"model": INFO}, [False, False]),
    "filler by name": (lambda r: _put(r, 0, torch.tensor([0, 1])), {"num_experts": 8, "filler": [0, 1]}, [False, True]),
    "filler in a dense layer": (
        lambda r: _put(r, 0, torch.tensor([0, 1])),
        {"model": INFO, "filler": range(2)},
        [False, True],
    ),
    "a lost row that may be live": (lambda r: _put(r, 0, 0), {"num_experts": 8, "missing": "live"}, [False, True]),
    "a lost layer that may be live": (lambda r: _put(r, (0, 2), 0), {"model": INFO, "missing": "live"}, [False, True]),
    "no expert's that may be live": (
        lambda r: _put(r, (0, 2, 0), 8),
        {"num_experts": 8, "missing": "live"},
        [False, True],
    ),
}


def _put(routes, where, value):
    routes = routes.clone()
    routes[where] = value
    return routes


@pytest.mark.parametrize("name", LEGAL)
def test_what_may_stand_in_routes_is_sealed_and_proved(name):
    change, options, routed = LEGAL[name]
    routes = change(ROUTES)
    sealed = seal.stamp(routes, TOKENS, **options)
    proved = seal.prove(sealed, num_experts=8)
    assert not proved.of_other_tokens(TOKENS).any()
    assert (~proved.absent).tolist() == routed
    kept = torch.tensor(routed)
    assert torch.equal(proved.ids[kept], routes[kept].to(torch.uint8))
    assert (sealed[~kept] == 255).all()
    wide = seal.stamp(routes, TOKENS, dtype=torch.int16, **options)
    assert (wide[~kept] == -1).all()


REFUSED = {
    "an id is no expert's": (lambda r: _put(r, (1, 2, 0), 8), {}, "MRR103: .*row 1, layer 3 .* outside 0..7"),
    "an id that uint8 would hide": (lambda r: _put(r, (1, 2, 0), 256 + 3), {}, "MRR103: .*row 1, layer 3"),
    "65535, a -1 that was cast": (lambda r: _put(r, (0, 1), 65535), {}, "MRR103: .*row 0, layer 2"),
    "an expert twice": (lambda r: _put(r, (1, 1), torch.tensor([5, 5])), {}, "MRR103: .*row 1, layer 2 .*named twice"),
    "a lost row": (lambda r: _put(r, 1, 0), {}, "MRR103: .*row 1, layer 1 .*Zeros are lost data"),
    "half a layer of -1": (lambda r: _put(r, (0, 1, 0), -1), {}, "MRR103: .*row 0, layer 2"),
    "a lost layer": (lambda r: _put(r, (1, 2), 0), {"model": INFO}, "MRR103: .*row 1, layer 3 .*named twice"),
    "routes in a dense layer": (
        lambda r: _put(r, (1, 0), torch.tensor([5, 6])),
        {"model": INFO},
        "MRR103: .*dense layers hold",
    ),
    "filler that nobody named": (
        lambda r: _put(r, 0, torch.tensor([0, 1])),
        {"model": INFO},
        "MRR103: .*dense layers hold",
    ),
    "another topk": (lambda r: r[..., :1], {"model": INFO}, "MRR411: .*1 experts a token, the model's topk is 2"),
    "a stage's layers": (
        lambda r: r[:, :1],
        {"model": INFO},
        "MRR411: routes have 1 layers; the model has 3, of which 2",
    ),
    "nobody says the experts": (lambda r: r, {"num_experts": None}, "MRR411: .*say num_experts=, or model="),
    "both say the experts": (lambda r: r, {"num_experts": 8, "model": INFO}, "MRR411: .*say num_experts=, or model="),
    "no count of experts": (lambda r: r, {"num_experts": 0}, "MRR101: num_experts=0"),
    "a word": (lambda r: r, {"missing": "skip"}, "MRR411: .*'raise' or 'live'"),
    "floats": (lambda r: r.float(), {}, "MRR201: routes must be integers"),
    "a dtype": (lambda r: r, {"dtype": torch.float32}, "MRR411: cannot stamp as torch.float32"),
    "a narrow dtype": (lambda r: r, {"num_experts": 300, "dtype": torch.uint8}, "MRR411: cannot stamp as torch.uint8"),
    "fewer tokens": (lambda r: torch.cat([r, r]), {}, "MRR411: .*one token a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_route_is_refused_at_the_stamp(name):
    change, options, message = REFUSED[name]
    options = options if "model" in options else {"num_experts": 8, **options}
    with pytest.raises(LayoutError, match=message):
        seal.stamp(change(ROUTES), TOKENS, **options)


EXPLAINED = {
    "another token": (lambda r: r.flip(0), 8, "row 0 (2 in all) is the row of token 18, the model gets 17 there"),
    "no seal": (lambda r: r[:, [0, 1, 2] * 2], 8, "row 0 (2 in all) bears no seal"),
    "another count of experts": (
        lambda r: r,
        16,
        "row 0 (2 in all) was sealed for a model of 8 experts, this one has 16",
    ),
    "another width": (lambda r: r.short(), 300, "was sealed with 1 bytes an id, the model's 300 experts take 2"),
    "a layer was cut": (
        lambda r: r[:, 1:],
        8,
        "is not as it was stamped: ids were changed, or layers cut or exchanged",
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_wrong_row_says_what_is_wrong_with_it(name):
    change, experts, message = EXPLAINED[name]
    batch = change(seal.stamp(ROUTES, TOKENS, num_experts=8))
    rows = seal.prove(batch, num_experts=experts)
    assert message in seal.explain(batch, rows, rows.of_other_tokens(TOKENS), TOKENS, num_experts=experts)


def test_filler_behind_the_stamp_is_told_from_sealed_rows():
    sealed = seal.stamp(ROUTES, TOKENS, num_experts=8, dtype=torch.int16)
    for filler, named in ((-1, None), (255, None), (torch.tensor([0, 1]), [0, 1])):
        rows = seal.prove(_put(sealed, 1, filler), num_experts=8, filler=named)
        assert (rows.absent.tolist(), rows.broken.tolist()) == ([False, True], [False, False])
    assert seal.prove(_put(sealed, 1, 0), num_experts=8).broken.tolist() == [False, True]  # lost on the way


BATCHES = {
    "one row less": (lambda r: r[:1], None),
    "-1 in the last row": (lambda r: _put(r, 1, -1), None),
    "zeros in the last row": (lambda r: _put(r, 1, 0), None),
    "255 in the last row": (lambda r: _put(r, 1, -1).byte(), None),
    "filler in the last row": (lambda r: _put(r, 1, torch.tensor([0, 1])), None),
    "a route in the last row": (lambda r: r, r"MRR103: cannot stamp sample 1: the row of the last token holds a route"),
    "more rows than tokens": (lambda r: torch.cat([r, r]), "MRR411: cannot stamp sample|MRR411: sample 1 has routes"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_stamped_sample_by_sample_and_a_last_token_has_no_route(name):
    change, message = BATCHES[name]
    routes = [ROUTES[:1], change(ROUTES)]
    if message is None:
        first, second = seal.stamp_batch(routes, [TOKENS, TOKENS], num_experts=8, filler=range(2))
        assert torch.equal(first, second)
        assert torch.equal(first, seal.stamp(ROUTES[:1], TOKENS, num_experts=8))
        return
    with pytest.raises(LayoutError, match=message):
        seal.stamp_batch(routes, [TOKENS, TOKENS], num_experts=8)


@pytest.mark.parametrize("experts", [8, 300], ids=["uint8", "int16"])
@pytest.mark.parametrize("routes", [[[3], [-1], [2]], [[3, 1], [-1, -1], [2, 0]]], ids=["top-1", "top-2"])
def test_a_layer_without_a_route_is_told_in_every_dtype(routes, experts):
    rows = torch.tensor([routes, routes])
    rows[1, 1] = torch.arange(rows.shape[2])
    proved = seal.prove(seal.stamp(rows, TOKENS, num_experts=experts), num_experts=experts)
    assert proved.lack_a_layer().tolist() == [True, False]


def test_a_batch_has_as_many_routes_as_samples():
    with pytest.raises(LayoutError, match="MRR411: cannot stamp routes of 1 samples with tokens of 2"):
        seal.stamp_batch([ROUTES], [TOKENS, TOKENS], num_experts=8)


def test_a_sample_without_rows_is_sealed_and_proved():
    sealed = seal.stamp(ROUTES[:0], TOKENS[:0], num_experts=8)
    assert sealed.shape == (0, 6, 2)
    assert seal.prove(sealed, num_experts=8).ids.shape == (0, 3, 2)
