"""The study of documents with one real training: what it reports is what sacreBLEU says of whole documents."""

import pytest
import sacrebleu
import torch

from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.corpora import held_out_documents
from rectiformer.studies.plan import Scale
from rectiformer.studies.running import load_results
from rectiformer.studies.single import Places, find_training, run_single
from rectiformer.text.prepared import prepare
from rectiformer.train.reporting import Silent
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

STUDY, SMOKE, KEY = STUDIES["document-length"], Scale("smoke"), "reluformer-32-seed1"


def test_documents_are_translated_whole_and_measured(tmp_path):
    torch.set_num_threads(1)
    places = Places(STUDY, SMOKE, tmp_path)
    training = find_training(places, KEY)
    prepare(training.config, places.data(training))
    measures = run_single(places, KEY, Silent()).measures
    documents = held_out_documents(SMOKE)
    sources = [[source for source, _ in document] for document in documents]
    translator = Translator.from_run(places.run(training), device="cpu")
    found = list(translate_documents(translator, sources, SearchOptions(), warn=lambda _: None))
    assert [len(each.sentences) for each in found] == [len(document) for document in documents]
    whole = sacrebleu.corpus_bleu(
        [" ".join(each.sentences) for each in found], [[" ".join(target for _, target in each) for each in documents]]
    )
    assert measures["d_bleu"] == pytest.approx(whole.score)
    assert 0 < measures["encoder_zeros"] < 1
    assert measures["peak_bytes"] > 10**7
    results = load_results(STUDY, SMOKE, tmp_path)
    rows = {row[0]: row[1] for row in STUDY.tables(results)[0].rows}
    assert rows["reluformer"] == f"{whole.score:.2f}"
    assert rows["softmax"] == ""
    assert [path.name for path in STUDY.figures(results, tmp_path / "figures")] == ["lengths.svg"]


def test_every_update_has_the_same_size_and_holds_the_longest_segment():
    for scale in ("small", "paper"):
        for training in STUDY.trainings(STUDY.at(scale)):
            settings = training.config.training
            assert settings.tokens >= training.config.data.segment == training.labels["length"]
            assert settings.tokens * settings.accumulate == 16_384
