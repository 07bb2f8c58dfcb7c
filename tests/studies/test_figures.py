"""Figures of studies: which models are drawn, and in which style."""

from rectiformer.studies.figures import MARKED, draw_panels, line_style
from rectiformer.studies.sparsity import above_zero


def colors(svg):
    return [number for number in range(3) if line_style(number)["color"].lower() in svg.lower()]


def test_lines_of_a_figure_differ_without_color_too():
    styles = [(line_style(number)["linestyle"], line_style(number)["marker"]) for number in range(40)]
    assert len(set(styles)) == 40


def test_a_model_with_nothing_but_zeros_is_not_drawn_and_the_others_keep_their_style(tmp_path):
    panels = [{"softmax": {1: [0.0, 0.0]}, "rela-g": {1: [0.0]}, "relu2": {1: [0.4]}}, {"rela-g": {1: [0.3]}}]
    shown = above_zero(panels, ["softmax", "rela-g", "relu2"])
    (path,) = draw_panels(tmp_path / "a.svg", ["one", "two"], shown, "layer")
    assert colors(path.read_text()) == [1, 2]
    assert shown[0]["rela-g"] == {1: [0.0]}  # not zero in the other panel


def test_a_model_looks_the_same_in_a_figure_that_lacks_those_before_it(tmp_path):
    shown = above_zero([{"relu2": {1: [0.4]}}], ["softmax", "rela-g", "relu2"])
    (path,) = draw_panels(tmp_path / "a.svg", ["one"], shown, "layer")
    assert colors(path.read_text()) == [2]


def test_nothing_is_drawn_where_all_are_zero(tmp_path):
    assert draw_panels(tmp_path / "a.svg", ["one"], above_zero([{"softmax": {1: [0.0]}}], ["softmax"]), "layer") == []
    assert not list(tmp_path.iterdir())


def test_some_of_many_points_are_marked(tmp_path):
    lines = {name: {x: [float(x)] for x in range(10 * MARKED)} for name in ("a", "b")}
    (path,) = draw_panels(tmp_path / "a.svg", ["one"], [lines], "updates")
    marks_and_ticks = path.read_text().count("<use ")
    assert 2 * MARKED < marks_and_ticks < 2 * 10 * MARKED
