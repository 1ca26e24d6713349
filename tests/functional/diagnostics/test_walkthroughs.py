"""Each walk-through finds its planted fault, and reports nothing without one."""

import importlib
import re
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def walk(monkeypatch, capsys):
    """Run a script's main(), in this process: its ranks come from the fork server that has imported Megatron-Core."""

    def run(script, *options, code):
        monkeypatch.setattr(sys, "argv", [script, *options])
        assert importlib.import_module(f"examples.walkthroughs.{script}").main() == code
        return capsys.readouterr().out

    return run


def test_two_layouts_differ_in_routing_and_with_the_same_routes_in_arithmetic_only(walk):
    shown = walk("two_layouts", code=1)
    own, same_bf16, same_fp32 = (float(number) for number in re.findall(r"^loss difference.* (\S+)$", shown, re.M))
    assert own > same_bf16 > same_fp32
    assert same_fp32 < 1e-5
    assert "verdict: routing differs in" in shown
    assert shown.rstrip().endswith("what is left is arithmetic")


def test_the_same_layout_twice_is_the_same(walk):
    shown = walk("two_layouts", "--same", code=0)
    assert "verdict: routing is the same" in shown
    assert "fact" not in shown


def test_the_noisy_layer_is_named_and_frozen(walk):
    shown = walk("recompute_flips", code=1)
    assert re.search(r"verdict: recomputes flip in layers \{4: \d+\}; freeze_recompute ends it", shown)
    assert "with freeze_recompute: 0 of 1280 decisions flip" in shown


def test_without_noise_no_recompute_flips(walk):
    assert "verdict: every recompute used its forward's experts" in walk("recompute_flips", "--no-noise", code=0)


def test_each_wrong_capture_is_named_by_diff_and_refused_by_the_replay(walk):
    shown = walk("wrong_capture", code=1)
    planted = dict(re.findall(r"^planted: (.+)\n((?:  .+\n)+)", shown, re.M))
    rows, zeroed, swapped = planted.values()
    assert "of the engine match the trainer's rows 0..254 (1 row earlier), in all layers" in rows
    assert "replay raised: the live router agrees with the replayed routes by" in rows
    assert re.search(r"in (\d) of \1 layers \(", rows)
    assert "diff: all 256 rows of the engine repeat one route, in layer 4: 256 of 256 decisions." in zeroed
    assert re.search(r"in 1 of \d layers \(.*4: -?\d%", zeroed)
    assert "diff: layers 3, 5 of the engine match layers 5, 3 of the trainer, in all 256 rows" in swapped
    assert re.search(r"in 2 of \d layers \(.*3: -?\d%.* 5: -?\d%", swapped)


def test_the_right_capture_is_not_accused(walk):
    shown = walk("wrong_capture", "--right", code=0)
    assert "verdict: nothing wrong with the capture" in shown
    assert "the live router agrees with 100.0% of the trace's routes" in shown
    assert "diff:" not in shown
    assert "fact" not in shown
