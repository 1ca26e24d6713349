"""The pictures and tables of docs/effect.md are those of the committed results."""

import pytest

from examples.effect.figures import IMAGES, Axis, Line, draw, pictures, tables
from examples.effect.results import removed

PAGE = IMAGES.parent / "effect.md"


def test_pictures_and_tables_are_those_of_the_results():
    for name, text in pictures().items():
        assert (IMAGES / name).read_text() == text, name
    for table in tables():
        assert table in PAGE.read_text()


def test_the_share_removed_is_of_what_lies_above_equal_routes():
    gap = {"kl_live": [0.11, 0.03], "kl": [0.01, 0.02], "kl_floor": [0.01, 0.01]}
    assert removed(gap) == pytest.approx([1.0, 0.5])


def test_lines_bands_and_labels_are_where_their_values_are():
    # The y axis runs from 246 (low) to 52 (high), the first step is 76 from the left, the last 584.
    low = Line(name="a", colour="red", values=[0, 1], band=[(0, 0.5), (1, 1)])
    drawn = draw("t", "s", "n", Axis(low=0, high=1, marks=(0, 1)), [low, Line(name="b", colour="grey", values=[1, 0])])
    assert '<polyline class="red" points="76.0,246.0 584.0,52.0"/>' in drawn
    assert '<polygon class="band red" points="76.0,246.0 584.0,52.0 584.0,52.0 76.0,149.0"/>' in drawn
    # Both means are 0.5, at y = 149: the second label makes way.
    assert 'y="153.0">a<' in drawn
    assert 'y="168.0">b<' in drawn


def test_a_logarithmic_axis_has_decades_at_equal_distances():
    axis = Axis(low=1e-4, high=1, marks=(), logarithmic=True)
    assert [axis.y(value) for value in (1e-4, 1e-2, 1, 5)] == pytest.approx([246, 149, 52, 52])
