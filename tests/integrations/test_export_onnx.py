"""What onnxruntime makes of exported graphs is what the run itself makes of the same sentences."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rectiformer.cli import app
from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import hash_file
from rectiformer.translate.evaluate import score_pairs
from rectiformer.translate.options import SearchOptions

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.long
FILES = ["decoder.onnx", "encoder.onnx", "export.json", "source.model", "target.model"]


def call(*words, **options):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, **options)
    assert result.exit_code == 0, result.output
    return result.stdout


SLOWLY = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("softmax", "reluformer")]


@pytest.mark.parametrize("variant", ["rela-g", *SLOWLY])
def test_exported_graphs_translate_as_the_run_does(variant, trained, translator, held_out, tmp_path):
    from rectiformer.integrations.onnx import OnnxTranslator

    out = tmp_path / "exported"
    call("export", trained(variant), "--to", "onnx", "--out", out)
    assert sorted(path.name for path in out.iterdir()) == FILES
    ours, theirs = translator(variant), OnnxTranslator(out)
    for beam in (1, 4):
        how = SearchOptions(beam=beam, nbest=beam)
        right, found = ours.translate(held_out, how), theirs.translate(held_out, how)
        assert [essence(each) for each in found] == [essence(each) for each in right]
        scores = [[each.score for line in lines for each in line.candidates] for lines in (found, right)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert theirs.fingerprint() == ours.fingerprint()
    assert_portable(out)
    assert call("translate", out, input=held_out[0]) == call("translate", trained(variant), input=held_out[0])
    refuse_what_graphs_cannot(theirs)
    refuse_commands_that_look_inside(out, tmp_path)
    refuse_graphs_that_are_swapped(out)


def essence(translation):
    return [(each.text, each.tokens, each.ended) for each in translation.candidates]


def assert_portable(folder):
    """Graphs hold ONNX's own operators, with free sizes, and tell nothing of the machine they were made on."""
    for name in ("encoder", "decoder"):
        graph = onnx.load(folder / f"{name}.onnx")
        assert {node.domain for node in graph.graph.node} == {""}
        assert not graph.functions
        axes = {axis.dim_param for value in graph.graph.input for axis in value.type.tensor_type.shape.dim}
        assert axes - {""} == {"batch", "source_length"} | ({"beam", "past_length"} if name == "decoder" else set())
    for path in folder.iterdir():
        assert not re.search(rb"/(tmp|root|home|work)/|\.py\b", path.read_bytes()), path.name


def refuse_what_graphs_cannot(translator):
    with pytest.raises(ArgumentError, match="use the run folder"):
        score_pairs(translator, [("Der Hund schläft.", "The dog sleeps.")])
    translator.max_length = 4096
    with pytest.raises(ArgumentError, match=r"a sequence of \d+ tokens, but the graphs were exported for 2048"):
        translator.translate(["Hund " * 3000], SearchOptions())


def test_onnxruntime_leaves_nothing_below_the_home_folder(tmp_path):
    """Its telemetry would write an id and a database there as soon as it is imported."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "empty", [value], [value])
    known = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=known), tmp_path / "graph.onnx")
    home = tmp_path / "home"
    home.mkdir()
    silencing = ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in silencing}
    code = "import sys; from pathlib import Path; from rectiformer.integrations.onnx import open_graph; "
    subprocess.run(
        [sys.executable, "-c", code + "open_graph(Path(sys.argv[1]), 1)", tmp_path / "graph.onnx"],
        env={**environment, "HOME": str(home)}, check=True,
    )  # fmt: skip
    assert list(home.rglob("*")) == []


def refuse_commands_that_look_inside(folder, tmp_path):
    (tmp_path / "text").write_text("Der Hund schläft.\n", encoding="utf-8")
    text = tmp_path / "text"
    for words in (["align", folder, text, text], ["score", folder, text, text], ["analyze", folder]):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert isinstance(result.exception, CheckpointError)
        assert "is exported, and this needs the run folder it was made from" in str(result.exception)
    result = CliRunner().invoke(app, ["translate", str(folder), str(text), "--json", "--alignments", "0:0:normal"])
    assert isinstance(result.exception, ArgumentError)


def refuse_graphs_that_are_swapped(folder):
    """Hashes in the folder say nothing to somebody who writes them anew."""
    from rectiformer.integrations.onnx import OnnxTranslator

    for taken, left in (("encoder", "decoder"), ("decoder", "encoder")):
        before = (folder / f"{left}.onnx").read_bytes()
        shutil.copy(folder / f"{taken}.onnx", folder / f"{left}.onnx")
        record = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        record["files"] = {name: hash_file(folder / name) for name in record["files"]}
        (folder / "export.json").write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(CheckpointError, match=rf"{left}\.onnx is damaged: it "):
            OnnxTranslator(folder)
        (folder / f"{left}.onnx").write_bytes(before)
