"""Figures of studies: which models are drawn, and in which style."""

import pytest

from rectiformer.studies.figures import MARKED, MOST_LINES, choose_styles, draw_panels, line_style, spread
from rectiformer.studies.sparsity import above_zero

NAMES = ["softmax", "rela-g", "relu2"]


def drawn(svg):
    return [name for name, look in choose_styles(NAMES).items() if look["color"].lower() in svg.lower()]


def test_lines_of_a_figure_differ_without_color_too():
    styles = [(line_style(number)["linestyle"], line_style(number)["marker"]) for number in range(40)]
    assert len(set(styles)) == 40


def test_a_model_with_nothing_but_zeros_is_not_drawn_and_the_others_keep_their_style(tmp_path):
    panels = [{"softmax": {1: [0.0, 0.0]}, "rela-g": {1: [0.0]}, "relu2": {1: [0.4]}}, {"rela-g": {1: [0.3]}}]
    shown = above_zero(panels, ["softmax", "rela-g", "relu2"])
    (figure,) = draw_panels(tmp_path / "a.svg", "A figure", ["one", "two"], shown, "layer")
    assert drawn(figure.path.read_text()) == ["rela-g", "relu2"]
    assert shown[0]["rela-g"] == {1: [0.0]}  # not zero in the other panel


def test_a_model_looks_the_same_in_a_figure_that_lacks_those_before_it(tmp_path):
    shown = above_zero([{"relu2": {1: [0.4]}}], ["softmax", "rela-g", "relu2"])
    (figure,) = draw_panels(tmp_path / "a.svg", "A figure", ["one"], shown, "layer")
    assert drawn(figure.path.read_text()) == ["relu2"]


def test_nothing_is_drawn_where_all_are_zero(tmp_path):
    assert (
        draw_panels(
            tmp_path / "a.svg", "A figure", ["one"], above_zero([{"softmax": {1: [0.0]}}], ["softmax"]), "layer"
        )
        == []
    )
    assert not list(tmp_path.iterdir())


def test_some_of_many_points_are_marked(tmp_path):
    lines = {name: {x: [float(x)] for x in range(10 * MARKED)} for name in ("a", "b")}
    (figure,) = draw_panels(tmp_path / "a.svg", "A figure", ["one"], [lines], "updates")
    marks_and_ticks = figure.path.read_text().count("<use ")
    assert 2 * MARKED < marks_and_ticks < 2 * 10 * MARKED


def test_labels_lie_apart_and_move_as_little_as_possible():
    assert spread([0.1, 0.5, 0.9], 0.2) == [0.1, 0.5, 0.9]
    assert spread([0.4, 0.5], 0.2) == pytest.approx([0.35, 0.55])
    assert spread([0.1, 0.5, 0.52, 0.54], 0.2) == pytest.approx([0.1, 0.32, 0.52, 0.72])
    assert spread([0.3, 0.5, 0.5], 0.2) == pytest.approx([0.433 - 0.2, 0.433, 0.433 + 0.2], abs=1e-3)


def test_more_lines_than_can_be_told_apart_are_refused(tmp_path):
    lines = {f"model {number}": {1: [number]} for number in range(MOST_LINES + 1)}
    with pytest.raises(AssertionError, match="too many lines"):
        draw_panels(tmp_path / "a.svg", "A figure", ["one"], [lines], "layer")
