"""The decoding benchmark runs on any machine, and CTranslate2 gets the very model it is compared with."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

TINY = {"hidden_size": 32, "num_heads": 4, "layers": 2, "ffn_size": 64, "vocabulary": 200}


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "points.jsonl"
    command = ["benchmarks/decoding.py", "--size", "tiny", "--sentences", "4", "--length", "6"]
    command += ["--variants", "rela-g", "softmax", "--peers", "--repeats", "1", "--turns", "1", "--device", "cpu"]
    exit_code, printed = python(*command, "--out", out)
    assert exit_code == 0, printed
    return [json.loads(line) for line in out.read_text().split("\n") if line], printed


def test_softmax_is_measured_first_and_every_point_names_what_it_needs(results):
    points, printed = results
    assert [point["contestant"] for point in points] == ["softmax", "rela-g"]
    assert [line.split()[0] for line in printed.split("\n") if line] == ["softmax", "rela-g"]
    for point in points:
        assert point["ms_least"] <= point["ms"] <= point["ms_most"]
        assert point["tokens_per_second"] == pytest.approx(4 * 6 / (point["ms"] / 1e3))
        assert (point["precision"], point["beam"], point["ratio"]) == ("fp32", 4, None)
        assert {"commit", "device", "torch", "threads", "command", "ready_seconds"} <= point.keys()


def test_every_sentence_gets_exactly_as_many_tokens_as_are_counted():
    from decoding import SPECIALS, build_model, draw_sources

    from rectiformer.translate.options import SearchBatch, SearchOptions
    from rectiformer.translate.search import search

    sources = draw_sources(3, 7, TINY["vocabulary"])
    found = search(build_model(TINY, "rela-g"), SearchBatch(sources, SearchOptions(extra_length=1), SPECIALS))
    assert [len(source) for source in sources] == [7] * 3
    assert [len(best.ids) for [best] in found] == [7] * 3


@pytest.mark.parametrize("beam", [1, 4])
def test_ctranslate2_finds_what_we_find(beam):
    pytest.importorskip("ctranslate2")
    from ctranslate import exported
    from decoding import SPECIALS, build_model, check_agreement, draw_sources

    model, sources = build_model(TINY, "softmax"), draw_sources(6, 12, TINY["vocabulary"])
    with exported(model, SPECIALS) as translator:
        check_agreement(model, translator, sources, beam)
        with torch.no_grad():
            model.decoder[0].memory.value_bias[0] += 1  # what was not exported shows
        with pytest.raises(AssertionError, match=rf"beam {beam}: "):
            check_agreement(model, translator, sources, beam)
