"""Maps of attention: the cells drawn are the weights that are not 0, and null rows are marked."""

import io

import numpy as np
import pytest
from analyze.drawn import SITES, example, side, sparse_weights
from matplotlib.image import imread

from rectiformer.analyze.plots import draw_map, printable, style
from rectiformer.analyze.record import Example


def cells_of(axis, key):
    """Column and row of every rectangle of a collection."""
    (collection,) = [each for each in axis.collections if each.get_gid().startswith(key)]
    return sorted((int(path.vertices[:, 1].min()), int(path.vertices[:, 0].min())) for path in collection.get_paths())


@pytest.mark.parametrize("kind", SITES)
def test_a_map_draws_every_weight_but_zero_and_marks_every_null_row(kind):
    weights = sparse_weights(heads=6, queries=5, keys=5 if kind != "cross" else 7, seed=3)
    weights[2] = 0
    weights[3, 0, 0] = 1e-30
    seen = example(weights, kind)
    axes = [axis for axis in draw_map(seen).axes if axis.get_visible() and axis.get_title()]
    assert [axis.get_title() for axis in axes] == [f"head {head}" for head in range(1, 7)]
    nulls = seen.sites[0].null.reshape(6, 5)
    for head, axis in enumerate(axes):
        assert cells_of(axis, "weights") == [tuple(cell) for cell in np.argwhere(weights[head])]
        assert cells_of(axis, "null") == [(row, 0) for row in np.flatnonzero(nulls[head])]
    assert nulls.sum() == 6


def test_on_paper_zeros_are_white_and_the_smallest_weight_is_not():
    weights = np.zeros((1, 3, 3), dtype=np.float32)
    weights[0, 0] = [9, 1e-6, 0]
    weights[0, 1, 1] = 5
    buffer = io.BytesIO()
    with style():
        figure = draw_map(example(weights))
        figure.savefig(buffer, format="png", dpi=200)
        axis = figure.axes[0]
        points = axis.transData.transform([(column + 0.5, row + 0.5) for row in range(3) for column in range(3)])
    pixels = imread(io.BytesIO(buffer.getvalue()))[..., :3]
    scale = 200 / figure.dpi
    colors = [pixels[round(pixels.shape[0] - y * scale), round(x * scale)] for x, y in points]
    shown = np.array(colors).reshape(3, 3, 3)
    assert (shown[0, 2] == 1).all()
    assert (shown[1, [0, 2]] == 1).all()
    brightness = shown.mean(-1)
    assert brightness[0, 0] < brightness[1, 1] < brightness[0, 1] < 0.95
    hatched = pixels[round(pixels.shape[0] - points[6][1] * scale), :]
    assert (hatched.mean(-1) < 0.9).sum() > 3


def test_negative_weights_have_their_own_side_of_the_scale():
    weights = np.array([[[0.5, -2.0], [0.0, 1.0]]], dtype=np.float32)
    (cells,) = [each for each in draw_map(example(weights)).axes[0].collections if "weights" in each.get_gid()]
    assert cells.get_clim() == (-2, 2)
    red, _, blue, _ = cells.to_rgba(-0.01)
    assert red > blue
    red, _, blue, _ = cells.to_rgba(0.01)
    assert red < blue


@pytest.mark.parametrize(("pieces", "labels"), [(30, 30), (31, 0), (256, 0)])
def test_long_sentences_have_no_names(pieces, labels):
    axes = draw_map(example(np.eye(pieces, dtype=np.float32)[None])).axes
    assert len(axes[0].get_xticklabels()) == len(axes[0].get_yticklabels()) == labels


def test_what_cannot_be_drawn_gives_no_map():
    assert draw_map(example(np.eye(257, dtype=np.float32)[None])) is None
    assert draw_map(Example(side(["a"]), side(["b"]), True, None, None, [])) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\0b\u202e", "a\ufffdb\ufffd"), ("$x$", r"\$x\$"), ("x" * 15, "x" * 14 + "…"), ("▁日本", "▁日本"), ("", "")],
)
def test_text_is_made_printable(text, shown):
    assert printable(text) == shown
