"""Every study at smoke, once: real trainings, and what is made of them in tables, figures and the report."""

import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest
import sacrebleu
import torch

from rectiformer.analyze.findings import analyze
from rectiformer.config import Config
from rectiformer.errors import ArgumentError
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.corpora import CORPORA, gold_pairs, held_out, held_out_documents, held_out_pairs
from rectiformer.studies.measures import translate_pairs
from rectiformer.studies.plan import Scale, Task, find_task, hash_config
from rectiformer.studies.report import write_report
from rectiformer.studies.running import load_results
from rectiformer.studies.single import run_single
from rectiformer.studies.sparsity import pairing_table
from rectiformer.studies.translation_quality import PANELS, PENALTIES
from rectiformer.text.prepared import Prepared
from rectiformer.train.reporting import Reporter
from rectiformer.translate.align import alignment_table
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

pytestmark = pytest.mark.long
SMOKE, DEFAULT = Scale("smoke"), Config()
DOCS = Path(__file__).parents[2] / "docs"
TRAINED = [study for study in STUDIES.values() if study.trains]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All trainings of all studies, in this process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("studies")
    for study in TRAINED:
        for training in study.trainings(SMOKE):
            run_single(Task(study, SMOKE, folder, training), Reporter())
    return folder


def open_run(out, study, key):
    return Translator.from_run(out / study / "smoke" / key / "run", device="cpu")


def measures_of(out, study, key):
    return json.loads((out / study / "smoke" / key / "result.json").read_text())["measures"]


def test_all_at_smoke_shows_every_study_and_trains_nothing_again(out, rectiformer):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    found = rectiformer("study", "all", "--scale", "smoke", "--out", out)
    assert found.code == 0, found.err
    for study in STUDIES.values():
        results = load_results(study, SMOKE, out)
        assert len(results.finished) == results.planned >= 1
        assert study.title in found.out
        for table in study.tables(results):
            assert table.title in found.out
    assert "alignment shows what translation-quality has measured; that is the study to run" in found.out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == before


def test_a_report_can_be_made_of_saved_results_alone(out, tmp_path):
    (out / "results").mkdir()
    (out / "results" / "slot-sweep-smoke.md").write_text("*A remark.*\n")
    page = write_report(out)
    saved = sorted(path.name for path in (out / "results").glob("*.jsonl"))
    assert saved == sorted(f"{study.name}-smoke.jsonl" for study in TRAINED)
    shutil.copytree(out / "results", tmp_path / "results")
    assert write_report(tmp_path).read_text() == page.read_text()
    assert contents(tmp_path) == {**contents(out), **contents(tmp_path)}
    assert len(contents(tmp_path)) == len(contents(out))
    assert "*A remark.*\n" in (out / "studies" / "slot-sweep.md").read_text()
    everything = "".join(text.decode() for text in contents(tmp_path).values())
    assert str(out) not in everything + "".join(path.read_text() for path in (out / "results").iterdir())
    for study in STUDIES.values():
        text = (out / "studies" / f"{study.name}.md").read_text()
        assert text.startswith(f"# {study.title}\n")
        assert f"rectiformer study {study.sources} --scale smoke --out studies\n" in text
        for table in study.tables(load_results(study, SMOKE, tmp_path)):
            assert not table.rows or table.to_markdown().strip() in text
    for path in (out / "figures").rglob("*.svg"):
        assert any(f"(../{path.relative_to(out)})" in text.read_text() for text in (out / "studies").glob("*.md"))
    assert "| memory-swap, smoke | relu above softmax | +1.14 [T] | +" in page.read_text()


def contents(folder):
    """The pages and figures of a report."""
    files = [*folder.glob("*.md"), *(folder / "studies").glob("*.md"), *(folder / "figures").rglob("*.svg")]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_the_pages_of_the_repository_are_what_the_command_writes(tmp_path):
    """From the saved results alone, text and figures."""
    shutil.copytree(DOCS / "results", tmp_path / "results")
    write_report(tmp_path)
    committed = contents(DOCS)
    for path, text in contents(tmp_path).items():
        assert committed.get(path) == text, f"run `rectiformer study report docs`: {path}"
    assert {path for path in committed if path.parts[0] == "figures"} <= contents(tmp_path).keys()
    for path in (tmp_path / "results").iterdir():
        assert path.read_bytes() == (DOCS / "results" / path.name).read_bytes()


def test_quality_is_what_sacrebleu_says_of_the_hypotheses(out):
    (corpus,) = CORPORA["smoke"]
    folder = out / "translation-quality" / "smoke" / "grammar-rela-g-seed1"
    measures = measures_of(out, "translation-quality", folder.name)
    lines = (folder / "hypotheses.txt").read_text().removesuffix("\n").split("\n")
    references = [target for _, target in held_out_pairs(SMOKE, corpus)]
    assert measures["bleu"] == pytest.approx(sacrebleu.corpus_bleu(lines, [references]).score)
    assert measures["chrf"] == pytest.approx(sacrebleu.corpus_chrf(lines, [references]).score)
    assert measures["length_ratio"] == pytest.approx(sacrebleu.corpus_bleu(lines, [references]).ratio, abs=1e-4)
    assert len(measures["resampled"]) == 500


def test_the_length_penalty_is_the_best_on_validation_data(out):
    (corpus,) = CORPORA["smoke"]
    key, study = "grammar-rela-g-seed1", STUDIES["translation-quality"]
    measures, translator = measures_of(out, study.name, key), open_run(out, study.name, key)
    valid = Prepared.open(find_task(study, SMOKE, out, key).data).valid_text

    def bleu(pairs, penalty):
        return translate_pairs(translator, pairs, penalty).scores["bleu"].value

    assert bleu(valid, measures["length_penalty"]) == max(bleu(valid, penalty) for penalty in PENALTIES)
    assert measures["tuned_bleu"] == bleu(held_out_pairs(SMOKE, corpus), measures["length_penalty"])


def test_heads_are_those_that_analyze_finds(out):
    (corpus,) = CORPORA["smoke"]
    key = "grammar-rela-g-seed1"
    found = analyze(open_run(out, "translation-quality", key), held_out_pairs(SMOKE, corpus), quality=False)
    measures = measures_of(out, "translation-quality", key)
    for site, expected in zip(measures["sites"], found.sites, strict=True):
        assert (site["site"], site["layer"]) == (expected.kind, expected.layer)
        assert site["zeros"] == pytest.approx(fmean(expected.sparsity), abs=1e-5)
        assert site["null_by_head"] == pytest.approx(expected.null_rate, abs=1e-5)
        assert site["js"] == pytest.approx(expected.diversity.js, abs=1e-5)
    assert measures["null_gold"] == pytest.approx(found.shuffled.gold.null_rate, abs=1e-5)
    assert measures["null_shuffled"] == pytest.approx(found.shuffled.shuffled.null_rate, abs=1e-5)
    (row,) = pairing_table(load_results(STUDIES["sparsity"], SMOKE, out)).rows
    assert row[1] == "rela-g"
    assert row[2:4] == tuple(f"{fmean(measures[side]):.3f}" for side in ("null_gold", "null_shuffled"))


def test_panels_hold_the_best_head_and_the_average_of_each_layer(out):
    (corpus,) = CORPORA["smoke"]
    pairs, gold = gold_pairs(SMOKE, corpus.gold[0])
    key = "grammar-rela-g-seed1"
    rows = alignment_table(open_run(out, "translation-quality", key), pairs, gold, tokenized=True)
    measures = measures_of(out, "translation-quality", key)
    panels = measures["alignment_grammar"]["panels"]
    for panel in PANELS:
        induction, how = panel.split(", ")
        errors = [
            row.score.aer
            for row in rows
            if row.induction == induction and (row.head == "average") == (how == "average")
        ]
        assert panels[panel] == pytest.approx([100 * min(errors)], abs=1e-4)
    assert measures["aer_grammar"] == min(error for errors in panels.values() for error in errors)
    low, high = measures["alignment_grammar"]["best"]["interval"]
    assert low < measures["aer_grammar"] < high


def test_documents_are_translated_whole_and_measured(out):
    study, key = STUDIES["document-length"], "rela-g-32-seed1"
    measures, documents = measures_of(out, study.name, key), held_out_documents(SMOKE)
    sources = [[source for source, _ in document] for document in documents]
    found = list(translate_documents(open_run(out, study.name, key), sources, SearchOptions(), warn=lambda _: None))
    assert [len(each.sentences) for each in found] == [len(document) for document in documents]
    whole = sacrebleu.corpus_bleu(
        [" ".join(each.sentences) for each in found], [[" ".join(target for _, target in each) for each in documents]]
    )
    assert measures["d_bleu"] == pytest.approx(whole.score)
    assert 0 < measures["encoder_zeros"] < 1
    assert measures["peak_bytes"] > 10**7
    rows = {row[0]: row[1] for row in study.tables(load_results(study, SMOKE, out))[1].rows}
    assert rows["rela-g"] == f"{whole.score:.2f}"
    assert [step for step, _ in measures["curve"]] == [10, 20, 30]
    assert 0 < measures["valid_loss"] < 10


def test_documents_start_from_models_of_sentences(out):
    study = STUDIES["document-length"]
    for training in study.trainings(SMOKE):
        variant, config = training.labels["variant"], Task(study, SMOKE, out, training).locate_start()
        start = out / "translation-quality" / "smoke" / f"grammar-{variant}-seed1" / "run"
        assert config.training.init_from == str(start)
        assert hash_config(config) == hash_config(training.config) != hash_config(DEFAULT)
        run = out / study.name / "smoke" / training.key / "run"
        assert (run / "source.model").read_bytes() == (start / "source.model").read_bytes()
        with pytest.raises(ArgumentError, match=f"first run .* --only grammar-{variant}-seed1. with the same --scale"):
            Task(study, SMOKE, out / "elsewhere", training).locate_start()


def test_every_update_of_documents_has_the_same_size_and_holds_the_longest_segment():
    study = STUDIES["document-length"]
    for scale in ("small", "paper"):
        for training in study.trainings(study.at(scale)):
            settings = training.config.training
            assert settings.batch_tokens >= training.config.data.segment_length == training.labels["length"]
            assert settings.batch_tokens * settings.grad_accumulation == 16_384


def test_a_softmax_memory_is_below_one_of_relu(out):
    """Seen: 17.4 and 32.5 BLEU."""
    study = STUDIES["memory-swap"]
    results = load_results(study, SMOKE, out)
    assert fmean(results.values("softmax", "bleu")) < fmean(results.values("relu", "bleu"))
    claim = study.tables(results)[0].rows[0]
    assert claim[:2] == ("relu above softmax", "+1.14 [T]")
    assert claim[3] == "open (one seed)"


def test_diagnostics_read_the_models_of_the_swap(out):
    study = STUDIES["memory-diagnostics"]
    assert Counter(path.name for path in (out / study.name).rglob("run")) == {}
    results = load_results(study, SMOKE, out)
    found = {entry.name: entry.measures["memories"] for entry in results.finished}
    expected = analyze(open_run(out, "memory-swap", "softmax-seed1"), held_out(SMOKE), quality=False).memories
    assert found["softmax"] == [asdict(memory) for memory in expected]
    for softmax, relu in zip(found["softmax"], found["relu"], strict=True):
        assert softmax["variance_ratio"] < relu["variance_ratio"] / 10  # seen: 0.002 against 0.6 and 1.4
        assert softmax["top_score_ratio"]["0.002"] > relu["top_score_ratio"]["0.002"]  # 0.17, 0.70 against 0.02
        assert softmax["anisotropy"] > relu["anisotropy"]  # 0.05, 0.18 against 0.00
    relu, softmax = study.tables(results)[1].rows
    assert (relu[0], softmax[0]) == ("relu", "softmax")
    assert softmax[1] == f"{fmean(memory['variance_ratio'] for memory in found['softmax']):.3f}"
