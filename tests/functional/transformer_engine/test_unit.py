"""test_recomputes of tests/unit/mcore again: what stands for Transformer Engine's checkpoints there is the real one here.

Not its random programs: a graph of Transformer Engine's non-reentrant checkpoint runs backward once, and they use some twice.
"""

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support import soft_te
from tests.unit.mcore.test_recomputes import *  # noqa: F403
from tests.unit.mcore.tiny_chunk import transformer_engine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _checkpoints_on_cpu() -> Iterator[None]:
    assert transformer_engine.__file__ is not None, "it is a stand-in"
    with soft_te.checkpoints_on_cpu(), mock.patch("torch.cuda.current_device", return_value=0):
        yield
