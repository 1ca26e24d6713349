"""Whatever batches a request's tokens are forwarded in, each request gets its own rows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.capture.echo import make, routes_of, rows


def test_decode_steps_are_sorted_many_at_a_time():
    """The 65th step makes room. What ends a request, or another size of the batch, does not wait."""
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=1)
    with capturer.forward(["a"], [0]):
        forward(rows(0))
    before = capturer.host_bytes
    for position in range(1, 64):
        with capturer.forward(["a"], [position]):
            forward(rows(position))
        assert capturer.host_bytes == before  # copied, not yet sorted in: the generation has no array
    with capturer.forward(["a"], [64]):
        forward(rows(64))
    assert capturer.host_bytes > before
    assert routes_of(capturer.finish("a", num_tokens=66)) == rows(*range(65))  # finish waits for what is on its way


def test_steps_that_do_not_go_on_one_token_further_are_kept_apart():
    """The same batch twice at one position (a token was rejected), in another order, and with a row that ended."""
    capturer, forward = make(max_num_tokens=16)
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=1)
    for ids, positions, numbers in [
        ("ab", [0, 0], (0, 40)),
        ("ab", [1, 1], (1, 41)),
        ("ab", [2, 2], (90, 91)),
        ("ab", [2, 2], (2, 42)),
        ("ba", [3, 3], (43, 3)),
        ("ab", [4, 4], (4, 44)),
        ("ab", [-1, 5], (92, 45)),
        ("ab", [-1, 6], (93, 46)),
        ([None, "b"], [7, 7], (94, 47)),
    ]:
        with capturer.forward(ids, positions):
            forward(rows(*numbers))
    assert routes_of(capturer.finish("a", num_tokens=6)) == rows(0, 1, 2, 3, 4)
    assert routes_of(capturer.finish("b", num_tokens=9)) == rows(*range(40, 48))


def test_a_step_in_flight_is_not_overwritten_by_the_next_one():
    capturer, forward = make()
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=1)
    with capturer.forward(["a", "b"], [0, 0]):
        forward(rows(0, 5))
    with capturer.forward(["b", "a"], [1, 1]):  # the batch is in another order now
        forward(rows(6, 1))
    assert routes_of(capturer.finish("a", num_tokens=3)) == rows(0, 1)
    assert routes_of(capturer.finish("b", num_tokens=3)) == rows(5, 6)


def test_packed_and_sequence_first_batches():
    capturer, forward = make()
    for name in "ab":
        capturer.add_request(name, num_prompt_tokens=2)
    capturer.begin_forward(["a", "b"], [0, 1, 0, 1, -1], query_lengths=[2, 3])
    forward(rows(0, 1, 4, 5, 7))
    capturer.end_forward()
    with capturer.forward(["a", "b"], [[2, 2], [3, 3]], sequence_first=True):  # rows: a2 b2 a3 b3
        forward(rows(2, 6, 3, 7))
    assert routes_of(capturer.finish("a", num_tokens=5)) == rows(0, 1, 2, 3)
    assert routes_of(capturer.finish("b", num_tokens=5)) == rows(4, 5, 6, 7)


def test_rejected_speculative_tokens_are_overwritten_and_surplus_is_trimmed():
    """Drafts at 2, 3, 4: one accepted, so 3 is forwarded again; then 4, 5, 6, and the request stops behind 5."""
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [[2, 3, 4]]):
        forward(rows(2, 30, 31))
    with capturer.forward(["a"], [[3, 4, 5, 6]]):
        forward(rows(3, 4, 32, 33))
    captured = capturer.finish("a", token_ids=[9, 9, 9, 9, 9, 9])
    assert routes_of(captured) == rows(0, 1, 2, 3, 4)
    assert captured.trace().num_tokens == 6


def test_a_prefill_in_chunks_is_one_prompt():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=5)
    for chunk in ([0, 1], [2, 3], [4]):
        with capturer.forward(["a"], [chunk]):
            forward(rows(*chunk))
    assert routes_of(capturer.finish("a", num_tokens=6)) == rows(0, 1, 2, 3, 4)


def test_a_preempted_request_that_is_forwarded_again_has_the_later_routes():
    capturer, forward = make()
    capturer.add_request("a", num_prompt_tokens=2)
    with capturer.forward(["a"], [[0, 1]]):
        forward(rows(0, 1))
    with capturer.forward(["a"], [2]):
        forward(rows(2))
    with capturer.forward(["a"], [[0, 1, 2]]):
        forward(rows(3, 4, 5))
    assert routes_of(capturer.finish("a", num_tokens=4)) == rows(3, 4, 5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_schedule_of_any_requests_gives_each_its_own_rows(data):
    """Random batches of random chunks, with padding, strangers and aborts: a route says whose it is and where."""
    capturer, forward = make(num_experts=30_000, topk=1, num_layers=1, max_num_tokens=64)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5), label="tokens of each request")
    for request in range(len(lengths)):
        prompt = data.draw(st.integers(1, lengths[request]))
        capturer.add_request(request, num_prompt_tokens=prompt)
    capturer.add_request("stranger", num_prompt_tokens=1, return_routed_experts=False)
    done = [0] * len(lengths)
    while any(done[i] < lengths[i] for i in range(len(lengths))):
        open_requests = [i for i in range(len(lengths)) if done[i] < lengths[i]]
        batch = data.draw(st.lists(st.sampled_from(open_requests), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, lengths[i] - done[i])) for i in batch]
        positions, routes = [], []
        for i, count in zip(batch, counts):
            filler = [-1] * data.draw(st.integers(0, 2))
            own = list(range(done[i], done[i] + count))
            left = data.draw(st.booleans())
            positions.append(filler + own if left else own + filler)
            routes += [[[1000 * i + p if p >= 0 else 29_999]] for p in positions[-1]]
            done[i] += count
        ids = [*batch, "stranger", None]
        positions += [[0], [0]]
        routes += [[[29_998]], [[29_997]]]
        flat = [p for one in positions for p in one]
        with capturer.forward(ids, flat, query_lengths=[len(one) for one in positions]):
            forward(routes)
    for i, length in enumerate(lengths):
        assert routes_of(capturer.finish(i, num_tokens=length + 1)) == [[[1000 * i + p]] for p in range(length)]
    assert capturer.finish("stranger") is None
