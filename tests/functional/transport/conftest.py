from collections.abc import Iterator

import pytest

from megatron_router_replay.transport import collective, open_store


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of these tests has several buckets."""
    monkeypatch.setattr(collective, "_BUCKET_BYTES", 1 << 20)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store of the test's own, where the processes of a transport meet."""
    store = open_store("127.0.0.1", is_server=True)
    yield store.port
    del store  # it served until here
