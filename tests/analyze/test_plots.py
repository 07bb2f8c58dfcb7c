"""Figures: what is drawn is what was found, what is missing is not drawn, and the same data give the same file."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from analyze.drawn import SITES, example, record, sparse_weights

from rectiformer import ArgumentError
from rectiformer.analyze.plots import (
    LOOKS,
    best_layer,
    draw_aer,
    draw_all,
    draw_diversity,
    draw_lengths,
    draw_memories,
    draw_null_rate,
    draw_sparsity,
    write_figures,
)
from rectiformer.analyze.record import write_record

CHARTS = {"sparsity", "null-rate", "diversity", "aer", "sparsity-by-length", "memories"}
HOSTILE = ["</script>", "$x$", "\0", "\u202eabc", "🙂", "\u0301", "x" * 10_000, "-->", "日本", "\\$", "_a", "\ud800"]


def findings(name="rela-g", layers=3, heads=2, seed=0):
    """Random findings, as JSON, of the form that analysis writes."""
    draw = np.random.default_rng(seed)
    sites = [
        {
            "kind": kind,
            "layer": layer,
            "heads": heads,
            **{key: draw.random(heads).tolist() for key in ("sparsity", "null_rate")},
            "diversity": {key: draw.random() for key in ("js", "js_zero", "dropped", "support_overlap")},
        }
        for kind in SITES
        for layer in range(layers)
    ]
    lengths = [
        {"kind": kind, "layer": layer, "lengths": [4, 8, 9], "sparsity": draw.random(2).tolist(), "rows": [10, 4]}
        for kind in SITES
        for layer in range(layers)
    ]
    alignment = [
        {"layer": layer, "head": head, "induction": induction, "aer": draw.random()}
        for layer in range(layers)
        for head in (*range(heads), "average")
        for induction in ("normal", "shifted")
    ]
    memories = [
        {
            "side": side,
            "layer": layer,
            "top_score_ratio": {"0.1": 0.9, "0.002": 0.2, "0.01": draw.random()},
            **{key: draw.random() for key in ("variance_ratio", "anisotropy", "used_slots")},
        }
        for side in SITES[:2]
        for layer in range(layers)
    ]
    card = {"name": name, "id": ""}
    parts = {"sites": sites, "by_length": lengths, "alignment": alignment, "memories": memories}
    return {"model": card, **parts}


def names(paths):
    return {path.stem for path in paths}


def lines_of(axis):
    """The points of each model's line; the dashes of single heads are not lines."""
    return [np.column_stack(line.get_data()).tolist() for line in axis.lines if line.get_linestyle() != "None"]


def test_two_models_give_every_figure_in_every_format(tmp_path):
    pair = [findings(layers=1), findings("softmax", layers=2, seed=1)]
    records = [record(example(sparse_weights())), record(example(sparse_weights(seed=2)))]
    written = write_figures(pair, records, tmp_path / "new" / "figures")
    assert names(written) == CHARTS | {"attention-1-1", "attention-2-1"}
    assert sorted(written) == sorted((tmp_path / "new" / "figures").iterdir())
    for path in written:
        content = path.read_bytes()
        if path.suffix == ".svg":
            assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
            assert b"date" not in content
        else:
            assert content.startswith(b"%PDF")
            assert b"CreationDate" not in content


@pytest.mark.parametrize(
    ("missing", "left_out"),
    [
        ({"alignment": None}, {"aer"}),
        ({"alignment": []}, {"aer"}),
        ({"memories": []}, {"memories"}),
        ({"by_length": []}, {"sparsity-by-length"}),
        ({"sites": []}, {"sparsity", "null-rate", "diversity"}),
        ({"sites": [], "by_length": [], "alignment": None, "memories": []}, CHARTS),
    ],
)
def test_a_figure_without_data_is_left_out(missing, left_out):
    drawn = {name for name, _ in draw_all([findings(layers=1) | missing], [])}
    assert drawn == CHARTS - left_out


def test_without_findings_there_are_only_maps(tmp_path):
    assert names(write_figures([], [record(example(sparse_weights()))], tmp_path, ["svg"])) == {"attention-1-1"}
    assert write_figures([], [record()], tmp_path) == []


def test_the_first_four_examples_are_mapped():
    drawn = [name for name, _ in draw_all([], [record(*[example(sparse_weights())] * 5)])]
    assert drawn == [f"attention-1-{number}" for number in range(1, 5)]


def test_the_same_data_give_the_same_bytes_in_another_process(tmp_path):
    seen = record(example(sparse_weights(), words=HOSTILE[:3]))
    write_record(seen, tmp_path / "record.json")
    code = (
        "import sys; from rectiformer.analyze.plots import write_figures as write\n"
        "from rectiformer.analyze.record import read_record as read\n"
        "write([], [read(sys.argv[1])], sys.argv[2], ('svg', 'pdf', 'png'))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "record.json"), str(tmp_path / "other")]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PATH": ""})
    for path in write_figures([], [seen], tmp_path / "own", ("svg", "pdf", "png")):
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.suffix


def test_lines_go_through_the_means_of_the_heads():
    pair = [findings(), findings("softmax", layers=2, seed=1)]
    axes = draw_sparsity(pair).axes
    assert [axis.get_title() for axis in axes] == list(SITES)
    for axis in axes:
        assert lines_of(axis) == [
            [
                [site["layer"] + 1, np.mean(site["sparsity"])]
                for site in each["sites"]
                if site["kind"] == axis.get_title()
            ]
            for each in pair
        ]
        dashes = [value for line in axis.lines if line.get_linestyle() == "None" for value in line.get_ydata()]
        heads = [each["sites"] for each in pair]
        assert sorted(dashes) == sorted(
            value for sites in heads for site in sites if site["kind"] == axis.get_title() for value in site["sparsity"]
        )


def test_diversity_has_a_row_for_divergence_and_one_for_overlap():
    found = findings()
    axes = draw_diversity([found]).axes
    for axis, key, kind in zip(axes, ["js"] * 3 + ["support_overlap"] * 3, SITES * 2, strict=True):
        values = [site["diversity"][key] for site in found["sites"] if site["kind"] == kind]
        assert lines_of(axis) == [[[layer, value] for layer, value in enumerate(values, 1)]]


def test_error_is_of_the_best_head_and_of_the_average():
    found = findings(heads=3)
    for axis in draw_aer([found]).axes:
        induction, what = axis.get_title().split(", ")
        rows = [row for row in found["alignment"] if row["induction"] == induction]
        if what == "best head":
            expected = [
                min(r["aer"] for r in rows if r["layer"] == layer and r["head"] != "average") for layer in range(3)
            ]
        else:
            expected = [row["aer"] for row in rows if row["head"] == "average"]
        assert lines_of(axis) == [[[layer, value] for layer, value in enumerate(expected, 1)]]


def test_a_model_without_gold_has_no_line_next_to_one_that_has_it():
    axes = draw_aer([findings() | {"alignment": None}, findings("softmax")]).axes
    assert [[line.get_linestyle() for line in axis.lines] for axis in axes] == [["--"]] * 4


def test_null_rates_are_cells_with_their_numbers():
    found = findings(layers=2, heads=3)
    found["sites"][0]["null_rate"] = [0.0, 1.0, 0.126]
    found["sites"][1]["null_rate"] = [0.001, 0.999, 0.5]
    axes = draw_null_rate([found]).axes
    assert len(axes) == 3
    texts = [text.get_text() for text in axes[0].texts]
    assert texts == ["0", "1", ".13", ".00", "1.00", ".50"]  # exactly 0 and 1 have no decimals
    (cells,) = axes[0].collections
    assert cells.get_array().ravel().tolist() == [0.0, 1.0, 0.126, 0.001, 0.999, 0.5]
    assert cells.to_rgba(0.0)[:3] == (1, 1, 1)
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["1", "2", "3"]
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == ["1", "2"]


def test_lengths_are_the_middles_of_bins_that_have_rows():
    found = findings(layers=2)
    found["by_length"] = [
        {"kind": "cross", "layer": layer, "lengths": [4, 8, 9, 12], "sparsity": values, "rows": [5, 0, 2]}
        for layer, values in enumerate([[0.2, 0.0, 0.6], [0.4, 0.0, 0.8]])
    ]
    (axis,) = draw_lengths([found]).axes
    assert np.allclose(lines_of(axis), [[[5.5, 0.3], [10.0, 0.7]]])


def test_memories_have_a_row_a_side_and_shares_in_order():
    found = findings(layers=2)
    axes = np.reshape(draw_memories([found, findings("b")]).axes, (2, 4))
    for row, label in zip(axes, SITES[:2], strict=True):
        parts = [part for part in found["memories"] if part["side"] == label]
        assert row[0].get_ylabel() == label
        for axis, key in zip(row[:3], ("variance_ratio", "anisotropy", "used_slots"), strict=True):
            assert lines_of(axis)[0] == [[part["layer"] + 1, part[key]] for part in parts]
        middle = np.mean([part["top_score_ratio"]["0.01"] for part in parts])
        assert np.allclose(lines_of(row[3])[0], [[0.002, 0.2], [0.01, middle], [0.1, 0.9]])


def test_models_differ_without_color_and_are_named():
    figure = draw_sparsity([findings(), findings("$soft$max_")])
    first, second = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    for look in ("get_linestyle", "get_marker", "get_markerfacecolor"):
        assert getattr(first, look)() != getattr(second, look)()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["rela-g", r"\$soft\$max_"]
    assert draw_sparsity([findings()]).legends == []


def test_the_layer_that_aligns_best_is_drawn():
    found, seen = findings("a"), record(name="a")
    best = min(found["alignment"], key=lambda row: row["aer"])["layer"]
    assert best_layer([findings("b", seed=5), found], seen) == best
    assert best_layer([findings("b")], seen) is None
    assert best_layer([found | {"alignment": None}], seen) is None


def test_hostile_text_is_only_text(tmp_path):
    seen = record(example(sparse_weights(queries=14, keys=14), words=HOSTILE))
    (path,) = write_figures([], [seen], tmp_path, ["svg"])
    assert "script" not in {element.tag.split("}")[1] for element in ElementTree.parse(path).iter()}
    only_memories = {"sites": [], "by_length": [], "alignment": None}
    assert write_figures([findings(name) | only_memories for name in HOSTILE[:2]], [], tmp_path, ["svg"])


def test_settings_of_the_reader_neither_matter_nor_change(tmp_path):
    (plain,) = write_figures([], [record(example(sparse_weights()))], tmp_path / "plain", ["svg"])
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        (other,) = write_figures([], [record(example(sparse_weights()))], tmp_path / "other", ["svg"])
        assert matplotlib.rcParams["font.size"] == 30
    assert plain.read_bytes() == other.read_bytes()


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="unknown figure format 'svgz'; did you mean 'svg'"):
        write_figures([findings()], [], tmp_path / "none", ["svgz"])
    with pytest.raises(
        ArgumentError, match=f"3 findings and 0 records, but a figure shows at most {len(LOOKS)} models"
    ):
        write_figures([findings()] * 3, [], tmp_path / "none")
    assert not (tmp_path / "none").exists()
