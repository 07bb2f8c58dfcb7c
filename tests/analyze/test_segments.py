"""Documents as one sequence: pieces, words and sentences of a record, and weights of the model."""

import numpy as np
import pytest
import torch

from rectiformer.analyze.record import read_record, to_json, write_record
from rectiformer.analyze.recording import record_documents, record_pairs
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import DataError
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator

LINES = ["das kleine Haus steht am Fluss.", "der Hund sieht zwei Katzen.", "und der Fluss steht.", "das Haus."]
DOCUMENT = [(LINES[0], LINES[1]), (LINES[2], ""), (LINES[3], LINES[0])]


@pytest.fixture(scope="module", params=[False, True], ids=["no separator", "separator"])
def translator(request):
    torch.manual_seed(0)
    vocabulary = Vocabulary.train(LINES * 20, VocabularyConfig(size=60), separator=request.param)
    sizes = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "ffn_size": 16}
    model = Transformer(ModelConfig(variant="rela-g", **sizes), vocabulary.size, vocabulary.size)
    return Translator(model, vocabulary, vocabulary, max_length=100)


def test_sentences_are_where_their_pieces_and_words_are(translator):
    example = record_documents(translator, [DOCUMENT]).examples[0]
    for side, texts in ((example.source, [s for s, _ in DOCUMENT]), (example.target, [t for _, t in DOCUMENT])):
        assert side.text == " ".join(texts)
        alone = [translator.source.pieces(text) for text in texts]
        for (first, last), pieces in zip(side.sentences, alone, strict=True):
            assert [piece.text for piece in side.pieces[first:last]] == [piece.text for piece in pieces]
        borders = {index for index, _ in enumerate(side.pieces)} - {
            index for first, last in side.sentences for index in range(first, last)
        }
        separators = 0 if translator.source.separator is None else len(texts) - 1
        assert len(borders) == separators + 1  # and the end
        for first, last, start, stop in side.words:
            covered = {index for piece in side.pieces[first:last] for index in range(piece.start, piece.stop)}
            assert set(range(start, stop)) <= covered


def test_a_document_of_one_sentence_is_that_sentence(translator):
    document = record_documents(translator, [DOCUMENT[:1]]).examples[0]
    pair = record_pairs(translator, DOCUMENT[:1]).examples[0]
    assert document.source.pieces == pair.source.pieces
    assert document.source.words == pair.source.words
    for one, other in zip(document.sites, pair.sites, strict=True):
        np.testing.assert_array_equal(one.dense(), other.dense())


def test_separators_are_read_by_the_model(translator):
    example = record_documents(translator, [DOCUMENT]).examples[0]
    ids = [translator.source.encode(source) for source, _ in DOCUMENT]
    separators = 0 if translator.source.separator is None else 2
    assert example.site("encoder", 0).keys == sum(map(len, ids)) + separators + 1


def test_sentences_survive_the_file(translator, tmp_path):
    record = record_documents(translator, [DOCUMENT, DOCUMENT[:1]], ["cross"], name="of documents")
    write_record(record, tmp_path / "a.json.gz")
    again = read_record(tmp_path / "a.json.gz")
    assert to_json(again) == to_json(record)
    assert [example.source.sentences for example in again.examples] == [
        example.source.sentences for example in record.examples
    ]
    assert again.model.name == "of documents"


def test_a_document_that_is_too_long_is_one_clear_line(translator):
    with pytest.raises(DataError, match=r"^document 2: \d+ source and \d+ target subwords, but at most 100 are read"):
        record_documents(translator, [DOCUMENT, DOCUMENT * 9])


@pytest.mark.parametrize("sentences", [[(3, 2)], [(0, 2), (1, 3)], [(0, 99)]], ids=["backward", "overlap", "beyond"])
def test_sentences_that_cannot_be_are_refused(translator, tmp_path, sentences):
    record = record_documents(translator, [DOCUMENT], ["cross"])
    record.examples[0].source.sentences[:] = sentences
    with pytest.raises(DataError, match=r"examples\[0\]\.source\.sentences\[\d\] has pieces"):
        write_record(record, tmp_path / "a.json")
