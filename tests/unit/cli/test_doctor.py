"""`router-replay doctor`: what is installed."""

import json

import pytest

from tests.unit.cli.runner import call


def test_doctor_names_what_is_installed(folder):
    assert json.loads(call("doctor", "--json").output)["environment"]["packages"]["torch"]["version"]
    assert "nothing stands in the way of replay" in call("doctor").output


@pytest.mark.parametrize(("version", "newer"), [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
def test_doctor_asks_megatron_core_itself_for_its_version(folder, monkeypatch, version, newer):
    # pip's metadata may be that of another installation beside the one that is imported.
    monkeypatch.setattr("megatron.core.__version__", version)
    environment = json.loads(call("doctor", "--json").output)["environment"]
    assert environment["packages"]["megatron-core"]["version"] == version
    assert environment["notes"][0] == "sessions were run with Megatron-Core 0.16.1, 0.17.1, 0.18.2, 0.19.2"
    assert ["newer" in note for note in environment["notes"][1:]] == [True] * newer
