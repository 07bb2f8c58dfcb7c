"""What the memory studies see on the built-in grammar, with real trainings of some seconds."""

from dataclasses import asdict
from statistics import fmean

import pytest
import torch

from rectiformer.analyze.findings import analyze
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.corpora import held_out
from rectiformer.studies.plan import Scale
from rectiformer.studies.running import load_results
from rectiformer.studies.single import Places, find_training, run_single
from rectiformer.text.prepared import prepare
from rectiformer.train.reporting import Silent
from rectiformer.translate.translator import Translator

SWAP, DIAGNOSTICS, SMOKE = STUDIES["memory-swap"], STUDIES["memory-diagnostics"], Scale("smoke")
MEMORIES = ("relu", "softmax", "softmax-ln")


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """The three memories of the paper, three seeds each, at 512 slots."""
    torch.set_num_threads(1)
    places = Places(SWAP, SMOKE, tmp_path_factory.mktemp("memory"))
    first = find_training(places, "relu-seed1")
    assert first.config.model.slots == 512
    prepare(first.config, places.data(first))
    for memory in MEMORIES:
        for seed in (1, 2, 3):
            run_single(places, f"{memory}-seed{seed}", Silent())
    return places.out


def test_a_softmax_memory_is_below_the_other_two(swapped):
    """Seen: softmax 17.4, 22.9, 18.6; with LayerNorm 22.9, 26.8, 22.4; ReLU 32.5, 35.6, 29.7 BLEU. LayerNorm helps, but
    does not reach ReLU after so few updates, as the paper says it does in the end; only the direction is asserted."""
    results = load_results(SWAP, SMOKE, swapped)
    bleu = {memory: fmean(results.values(memory, "bleu")) for memory in MEMORIES}
    assert bleu["softmax"] < bleu["softmax-ln"]
    assert bleu["softmax"] < bleu["relu"]
    shown = SWAP.tables(results)[1]
    assert shown.rows[0][:2] == ("relu above softmax", "+1.14 [T c,i]")
    assert shown.rows[0][3] == "agree"


def test_diagnostics_read_the_models_of_the_swap(swapped):
    places = Places(DIAGNOSTICS, SMOKE, swapped)
    run = swapped / "memory-swap" / "smoke" / "softmax-seed1" / "run"
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*.safetensors"))
    for memory in ("relu", "softmax"):
        run_single(places, f"{memory}-seed1", Silent())
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*.safetensors")) == before
    results = load_results(DIAGNOSTICS, SMOKE, swapped)
    found = {entry.name: entry.measures["memories"] for entry in results.finished}
    expected = analyze(Translator.from_run(run, device="cpu"), held_out(SMOKE), quality=False).memories
    assert [(each["side"], each["layer"]) for each in found["softmax"]] == [("encoder", 0), ("decoder", 0)]
    assert found["softmax"] == [asdict(memory) for memory in expected]
    for softmax, relu in zip(found["softmax"], found["relu"], strict=True):
        assert softmax["variance_ratio"] < relu["variance_ratio"] / 10  # seen: 0.002 against 0.6 and 1.4
        assert softmax["top_score_ratio"]["0.002"] > relu["top_score_ratio"]["0.002"]  # 0.17, 0.70 against 0.02
        assert softmax["anisotropy"] > relu["anisotropy"]  # 0.05, 0.18 against 0.00
    paper, relu, softmax = DIAGNOSTICS.tables(results)[0].rows
    assert (paper[0], relu[0], softmax[0]) == ("paper", "relu", "softmax")
    assert softmax[1] == f"{fmean(memory['variance_ratio'] for memory in found['softmax']):.3f}"
    names = [path.name for path in DIAGNOSTICS.figures(results, swapped / "figures")]
    assert names == ["variance-ratio.svg", "top-score-ratio.svg"]
