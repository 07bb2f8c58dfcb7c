"""Streams, records and where long lines are cut."""

import json
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rectiformer.translate.chunks as chunks_module
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, DataError
from rectiformer.model.transformer import Transformer
from rectiformer.text.lines import read_lines
from rectiformer.text.vocabulary import Piece, Vocabulary
from rectiformer.translate.align import align_pairs
from rectiformer.translate.chunks import chunk_lines, translate_line_chunk
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.records import to_record, to_records
from rectiformer.translate.translator import Candidate, Translation, Translator, split_pieces

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]
QUICK = SearchOptions(beam=2, nbest=2, extra_length=3)


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


def translate_stream(translator, lines, buffer=1000, prefixes=None, warn=warnings.warn):
    """Translations of lines as they come, as the command has them."""
    for chunk in chunk_lines(lines, buffer, prefixes):
        yield from translate_line_chunk(translator, chunk, QUICK, warn=warn)


@pytest.fixture(scope="module")
def translator():
    words = Vocabulary.train(generate_lines(200), VocabularyConfig(size=60))
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=2, ffn_size=16)
    return Translator(Transformer(config, words.size, words.size).double(), words, words, max_length=60)


@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_a_stream_gives_what_a_list_gives(translator, buffer):
    lines = ["", *generate_lines(20), " ", "das"]
    assert [
        (each.line, each.source, each.text) for each in translate_stream(translator, iter(lines), buffer=buffer)
    ] == [(each.line, each.source, each.text) for each in translator.translate(lines, QUICK)]


def test_a_stream_reads_no_further_than_its_buffer(translator, monkeypatch):
    taken = []
    endless = (taken.append(number) or "das Haus" for number in iter(int, 1))
    assert next(translate_stream(translator, endless, buffer=5)).line == 1
    assert len(taken) == 5
    monkeypatch.setattr(chunks_module, "BUFFER_CHARACTERS", 20)
    taken.clear()
    next(translate_stream(translator, endless, buffer=5))
    assert len(taken) == 3  # 24 characters


@pytest.mark.parametrize("bad_utf8", ["skip", "replace"])
def test_a_file_of_hostile_lines_gives_a_translation_each(translator, tmp_path, bad_utf8):
    path = tmp_path / "lines.txt"
    raw = [b"\xef\xbb\xbfdas Haus", b"", b"caf\xe9", b"a\xe2\x80\xa8b\rc\xc2\x85d", b"a\0b", b"\r", b"der Hund"]
    path.write_bytes(b"\n".join(raw))  # no line feed at the end
    warned = []
    found = list(translate_stream(translator, read_lines(str(path), bad_utf8), warn=warned.append))
    assert [each.line for each in found] == list(range(1, 8))
    assert found[0].source == "das Haus"
    assert found[3].source == "a\u2028b\rc\x85d"
    assert [number for number, each in enumerate(found) if not each.candidates[0].tokens] == (
        [1, 2, 5] if bad_utf8 == "skip" else [1, 5]
    )
    note = "not UTF-8, so its translation is empty"
    assert warned == ([f"line 3: {note}"] if bad_utf8 == "skip" else [])
    assert found[2].warnings[:1] == [note] if bad_utf8 == "skip" else found[2].source == "caf\ufffd"


def test_a_stream_with_bad_utf8_names_the_byte(translator, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"das Haus\ncaf\xe9\n")
    stream = translate_stream(translator, read_lines(str(path)), buffer=1)
    assert next(stream).source == "das Haus"
    with pytest.raises(DataError, match=r"lines\.txt:2:4: not UTF-8 \(0xE9\)"):
        next(stream)


def test_prefixes_go_with_their_lines_and_must_be_as_many(translator):
    lines, prefixes = generate_lines(5), ["der", "", "zwei", "am", "und"]
    found = translate_stream(translator, lines, buffer=2, prefixes=iter(prefixes))
    assert all(each.text.startswith(prefix) for each, prefix in zip(found, prefixes, strict=True))
    with pytest.raises(DataError, match="only 3 prefixes, but line 4 follows"):
        list(translate_stream(translator, lines, buffer=2, prefixes=prefixes[:3]))
    with pytest.raises(DataError, match="more than 5 prefixes for 5 lines"):
        list(translate_stream(translator, lines, buffer=2, prefixes=[*prefixes, ""]))


def test_a_record_is_json_and_holds_everything():
    impossible = Candidate("b", ["▁b"], float("-inf"), float("-inf"), [float("-inf")], False)
    best = Candidate("a\u2028", ["▁a", "</s>"], -1.0, -2.0, [-1.5, -0.5], True)
    record = to_record(Translation(3, "x\0", [best, impossible], ["cut"]), links={(1, 2), (0, 0)})
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "line": 3,
        "source": "x\0",
        "translation": "a\u2028",
        "score": -1.0,
        "tokens": ["▁a", "</s>"],
        "token_scores": [-1.5, -0.5],
        "nbest": [
            {"translation": "a\u2028", "score": -1.0, "log_probability": -2.0, "ended": True},
            {"translation": "b", "score": None, "log_probability": None, "ended": False},
        ],
        "warnings": ["cut"],
        "alignment": "0-0 1-2",
    }


def test_records_have_alignments_and_heads_only_if_asked(translator):
    translations = translator.translate(["das Haus", "", "der Hund"], QUICK)
    assert all({"alignment", "heads"}.isdisjoint(record) for record in to_records(translator, translations))
    links = align_pairs(translator, [(each.source, each.text) for each in translations], layer=1, head=0)
    records = list(to_records(translator, translations, align=(1, 0, "normal"), heads=True, buffer=2))
    assert [set(record["alignment"].split()) for record in records] == [{f"{i}-{j}" for i, j in each} for each in links]
    assert links[1] == set()
    for record, translation in zip(records, translations, strict=True):
        M, N = (len(translator.source.encode(text)) for text in (translation.text, translation.source))
        assert torch.tensor(record["heads"]["weights"]).shape == (2, 2, M + 1, N + 1)
        assert (len(record["heads"]["target"]), len(record["heads"]["source"])) == (M, N)


def test_a_record_of_a_split_line_says_why_it_has_no_alignment(translator):
    warned = []
    translations = translator.translate(["das Haus", "Haus " * 99, "der"], QUICK, warn=warned.append)
    records = list(to_records(translator, translations, align=(0, "average", "shifted")))
    assert ["alignment" in record for record in records] == [True, False, True]
    assert records[1]["warnings"][-1] == "no alignment: a side has more than 60 subwords"
    with pytest.raises(ArgumentError, match="no decoder layer has index 2; there are 2, indices 0 to 1"):
        next(to_records(translator, translations, align=(2, 0, "normal")))


def pieces_of(line):
    """One piece per character: each is a possible cut."""
    return [Piece(number, character, number, number + 1) for number, character in enumerate(line)]


@pytest.mark.parametrize(
    ("line", "longest", "parts"),
    [
        ("aa bb. cc dd. ee ff", 16, ["aa bb. cc dd.", " ee ff"]),
        ("aa! (bb?) cc dd", 11, ["aa! (bb?)", " cc dd"]),
        ("aa bb cc", 7, ["aa bb", " cc"]),
        ("v1.2.3 bb", 8, ["v1.2.3", " bb"]),
        ("日本。日本日本", 5, ["日本。", "日本日本"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("aa", 2, ["aa"]),
        ("", 1, [""]),
    ],
)
def test_lines_are_cut_after_a_sentence_else_at_white_space_else_anywhere(line, longest, parts):
    groups = split_pieces(line, pieces_of(line), longest)
    assert ["".join(line[index] for index in group) for group in groups] == parts


def test_white_space_at_the_end_of_a_piece_is_cut_after():
    pieces = [
        Piece(0, "aa▁", 0, 3),
        Piece(1, "b", 3, 4),
        Piece(2, "b▁", 4, 6),
        Piece(3, "c", 6, 7),
        Piece(4, "c", 7, 8),
    ]
    assert split_pieces("aa bb cc", pieces, 4) == [[0, 1, 2], [3, 4]]


def test_a_character_spelled_in_bytes_is_not_cut():
    line = "ab。日c"  # the fourth character takes three pieces
    pieces = [Piece(0, "a", 0, 1), Piece(1, "b", 1, 2), Piece(2, "。", 2, 3)]
    pieces += [Piece(3 + number, "<byte>", 3, 4) for number in range(3)] + [Piece(6, "c", 4, 5)]
    assert split_pieces(line, pieces, 5) == [[0, 1, 2], [3, 4, 5, 6]]
    assert split_pieces("abxyc", pieces, 5) == [[0, 1, 2], [3, 4, 5, 6]]
    assert split_pieces("abxyc", pieces, 2) == [[0, 1], [2], [3, 4], [5, 6]]  # there, nothing else is possible


@given(st.text("ab. 。!\u2028\0é", max_size=60), st.integers(1, 12))
def test_parts_hold_every_piece_once_and_fit(line, longest):
    groups = split_pieces(line, pieces_of(line), longest)
    assert [index for group in groups for index in group] == list(range(len(line)))
    assert all(0 < len(group) <= longest for group in groups) or not line
