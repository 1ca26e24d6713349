"""The README's picture shows the committed figures."""

import json

from benchmarks.picture import FIGURES, PICTURE, draw


def test_the_picture_is_the_one_that_the_figures_make():
    assert PICTURE.read_text() == draw(json.loads(FIGURES.read_text())["rollout_kl"])


def test_a_line_goes_through_its_values():
    # 1e-5 lies on the lowest line (y = 246), 1e-2 on the highest (y = 52); the first step is 80 from the left, the last 590.
    drawn = draw({"off": [1e-2, 1e-5], "r3": [1e-5, 1e-5]})
    assert 'class="off" points="80.0,52.0 590.0,246.0"' in drawn
    assert 'class="r3" points="80.0,246.0 590.0,246.0"' in drawn
    assert "500-fold (mean of 2 rollouts)" in drawn  # (1e-2 + 1e-5) / 2 = 5.005e-3
