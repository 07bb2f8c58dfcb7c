"""How far attention reaches in documents: hand-made weights with known answers, and a model's against its record."""

import json
import random

import numpy as np
import pytest
import torch
from closeness import peak_allocation

from rectiformer.analyze.findings import analyze, analyze_documents
from rectiformer.analyze.meters import NOWHERE, DistanceMeter
from rectiformer.analyze.recording import record_documents
from rectiformer.analyze.segments import JoinedPairs, cut_documents, matching_segments, take, two_sides
from rectiformer.analyze.survey import SiteObserver, run_survey, weighing_sites
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import DataError
from rectiformer.measure.bleu import score
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]


def draw_lines(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(count)]


VOCABULARIES = {
    each: Vocabulary.train(draw_lines(200, 0), VocabularyConfig(size=60), separator=each) for each in (0, 1)
}
DOCUMENTS = [list(zip(draw_lines(size, size), draw_lines(size, 50 + size), strict=True)) for size in (7, 1, 4, 5)]


def build(variant="rela-g", segment=40, separator=True, max_length=1000):
    torch.manual_seed(0)
    words = VOCABULARIES[separator]
    sizes = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 2, "ffn_size": 16}
    model = Transformer(ModelConfig(variant=variant, **sizes), words.size, words.size)
    return Translator(model, words, words, segment_length=segment, max_length=max_length)


def measure(weights, queries, keys):
    meter = DistanceMeter()
    meter.update(torch.tensor(weights, dtype=torch.float64), torch.tensor(queries), torch.tensor(keys))
    return meter.result()


def test_hand_made_weights_have_their_known_shares():
    """Four source sentences of a piece each and the end; sentence 1 is generated in a row, then a separator."""
    heads = [[[1.0, 4.0, 2.0, 8.0, 1.0], [9.0] * 5], [[0.0] * 5, [9.0] * 5]]
    found = measure([heads], [[1, NOWHERE]], [[0, 1, 2, 3, NOWHERE]])
    assert (found.aligned, found.neighbors, found.farther, found.between) == (4 / 16, 3 / 16, 8 / 16, 1 / 16)
    assert found.null_rate == 1 / 2


def test_negative_weights_count_by_their_size():
    found = measure([[[[-3.0, 1.0]]]], [[0]], [[0, 1]])
    assert (found.aligned, found.neighbors) == (0.75, 0.25)


def test_sequences_of_a_batch_have_their_own_sentences():
    weights = [[[[1.0, 1.0, 2.0]]], [[[1.0, 1.0, 2.0]]]]
    found = measure(weights, [[0], [2]], [[0, 0, 1], [0, 1, 2]])
    assert (found.aligned, found.neighbors, found.farther) == (4 / 8, 3 / 8, 1 / 8)


def test_a_meter_that_saw_nothing_says_zero():
    assert set(vars(DistanceMeter().result()).values()) == {0.0}
    null = measure([[[[0.0, 0.0]]]], [[0]], [[0, 1]])
    assert (null.aligned, null.null_rate) == (0.0, 1.0)


@pytest.mark.parametrize("variant", ["rela-g", "softmax"])
def test_streaming_equals_the_dense_weights_of_the_record(variant):
    translator = build(variant)
    found = analyze_documents(translator, DOCUMENTS, quality=False)
    segments = take(DOCUMENTS, cut_documents([translator], DOCUMENTS))
    assert max(map(len, segments)) > 3
    examples = record_documents(translator, segments, ["cross"]).examples
    for layer, measured in enumerate(found.distances):
        sums, null = np.zeros(4), []
        for example in examples:
            weights = example.site("cross", layer).dense().astype(np.float64)
            for number, (first, last) in enumerate(example.target.sentences):
                rows = weights[:, first:last]
                null.extend((rows == 0).all(-1).ravel())
                for other, (start, stop) in enumerate(example.source.sentences):
                    sums[min(2, abs(other - number))] += rows[..., start:stop].sum()
                sums[3] += rows.sum()
        sums[3] -= sums[:3].sum()
        shares = [measured.aligned, measured.neighbors, measured.farther, measured.between]
        assert shares == pytest.approx(sums / sums.sum(), abs=1e-6)
        assert measured.null_rate == np.mean(null)
        assert measured.layer == layer
    assert min(shares) > 0


def test_a_model_of_sentences_is_measured_as_by_its_sentences():
    translator = build(segment=0, separator=False)
    pairs = take(DOCUMENTS, [(0, 17)])[0]
    found, plain = analyze_documents(translator, DOCUMENTS, quality=False), analyze(translator, pairs, quality=False)
    assert (found.data.documents, found.data.segments, found.data.sentences) == (4, 17, 17)
    assert (found.sites, found.shuffled, found.memories) == (plain.sites, plain.shuffled, plain.memories)
    for each in found.distances:
        assert each.aligned + each.between == pytest.approx(1)
        assert (each.neighbors, each.farther) == (0, 0)


def test_distances_are_in_the_file(tmp_path):
    found = analyze_documents(build(), DOCUMENTS, quality=False)
    found.write(tmp_path / "found.json")
    content = json.loads((tmp_path / "found.json").read_text())
    assert content == found.to_json()
    assert content["distances"] == [vars(each) for each in found.distances]


def test_segments_fit_every_model_and_stay_inside_documents():
    small, large = build(segment=20), build(segment=60)
    together = cut_documents([large, small], DOCUMENTS)
    assert together == cut_documents([small], DOCUMENTS) != cut_documents([large], DOCUMENTS)
    assert [index for first, last in together for index in range(first, last)] == list(range(17))
    assert {0, 7, 8, 12} <= {first for first, _ in together}
    for segment in take(DOCUMENTS, together):
        joined = JoinedPairs(small, two_sides([segment]))
        assert len(segment) == 1 or max(joined.padded_lengths) <= 20
    assert cut_documents([build(max_length=20)], DOCUMENTS) == together


def test_the_segment_of_another_run_holds_the_last_sentence():
    assert matching_segments([(0, 4), (6, 7)], [(0, 3), (3, 5), (5, 9)]) == [(3, 5), (5, 9)]


def test_documents_that_cannot_be_measured_are_refused_in_one_line():
    with pytest.raises(DataError, match=r"^0 sentence pairs; there is nothing to analyze$"):
        analyze_documents(build(), [])
    documents = [*DOCUMENTS, [("das", "das"), ("das", "Haus " * 60)]]
    with pytest.raises(DataError, match=r"^document 5, sentence 2: \d+ subwords, but at most 50 are read at once"):
        analyze_documents(build(max_length=50), documents)


def test_a_document_never_has_all_its_weights_in_memory():
    translator = build(segment=10**6, max_length=10**6)
    translator.model.double()

    def peak(sentences):
        joined = JoinedPairs(translator, two_sides([[("das Haus", "der Hund")] * sentences]))

        def work():
            cross = [site for site in weighing_sites(translator.model) if site.kind == "cross"]
            observers = [SiteObserver(site, [1, 10**6], joined) for site in cross]
            run_survey(observers, translator, joined, lambda _: None)

        return int(joined.source_lengths[0]), peak_allocation(work)

    (short, little), (long, much) = peak(100), peak(600)
    assert long > 5.9 * short
    assert much < 8 * 2 * long * long
    assert much < 5 * little


def test_quality_is_that_of_documents_translated_as_a_whole():
    translator, documents = build(), [DOCUMENTS[1], DOCUMENTS[2][:2]]
    said = []
    found = analyze_documents(translator, documents, warn=said.append).quality
    sources = [sources for sources, _ in two_sides(documents)]
    own = list(translate_documents(translator, sources, SearchOptions(), warn=lambda _: None))
    lines = [text for each in own for text in each.sentences]
    expected = score(lines, [target for each in documents for _, target in each], ("bleu",))["bleu"]
    assert (found.bleu, found.signature) == (expected.value, expected.signature)
    counts = f"{sum(each.fallbacks for each in own)} of {sum(each.segments for each in own)} segments"
    assert said == [f"for BLEU, {counts} did not come back sentence by sentence, and were translated in smaller ones"]
