"""Many tests here ask the garbage collector what a session has left behind."""

import pytest


@pytest.fixture(autouse=True)
def _quick_collections(imports_are_frozen: None) -> None:
    pass
