"""Subwords: the same text comes back, offsets in the line hold, and no file or text can take the program down."""

import hashlib
import os
import re
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.config import VocabularyConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.vocabulary import Vocabulary, reject_unsafe_model

TEXT = [
    "The old dog sees a small house near the river.",
    "Der alte Hund sieht ein kleines Haus am Fluss.",
    "Züge fahren über die Brücke, e\u0301tude, 日本語 のテスト 😀👍🏽.",
    "She does not know why the houses are so old, but the dogs do.",
] * 5
KINDS = ["unigram", "bpe"]


@pytest.fixture(scope="module", params=KINDS)
def spelling(request):
    """A vocabulary to which no character is unknown."""
    return Vocabulary.train(TEXT, VocabularyConfig(kind=request.param, size=400, byte_fallback=True))


@pytest.fixture(scope="module", params=KINDS)
def plain(request):
    return Vocabulary.train(TEXT, VocabularyConfig(kind=request.param, size=150))


def normalize(text):
    """What the module documents, written down once more."""
    text = re.sub("[\0\ud800-\udfff]", "\ufffd", text)
    return re.sub("[ \t\n\r\u2581]+", " ", text).strip(" ")


HOSTILE = st.text(
    st.one_of(
        st.characters(),  # lone surrogates too
        st.sampled_from("\0\t\r\n\u2581\u2028\u0085\ufeff\u202e\u2066\u200d\u0301\u0300 a<>s/日😀🏽"),
    ),
    max_size=60,
)


@given(text=HOSTILE)
def test_decoding_gives_the_documented_normalization(spelling, text):
    assert spelling.decode(spelling.encode(text)) == normalize(text)


@pytest.mark.parametrize(
    "text", ["<s> </s> <unk> <pad> <0x41>", "a\0b", "\ud800x", "\u2581 \u2581a", "e\u0301" * 50, ""]
)
def test_texts_that_look_like_symbols_come_back(spelling, text):
    assert spelling.decode(spelling.encode(text)) == normalize(text)


@given(text=HOSTILE)
def test_every_character_is_in_the_span_of_some_piece(spelling, text):
    pieces = spelling.pieces(text)
    assert [piece.id for piece in pieces] == spelling.encode(text)
    covered = {index for piece in pieces for index in range(piece.start, piece.end)}
    blank = {index for index, character in enumerate(text) if character in " \t\n\r\u2581"}
    assert covered | blank == set(range(len(text)))
    assert all(before.start <= after.start for before, after in pairwise(pieces))


@pytest.mark.parametrize(
    "text", ["The 日本 dogs 😀👍🏽", "e\u0301tude e\u0301", "  Der   Hund \u2028", "a\0b \u202eזה"]
)
def test_offsets_cut_the_line_into_the_pieces(plain, spelling, text):
    for piece in plain.pieces(text) + spelling.pieces(text):
        surface = text[piece.start : piece.end]
        if not re.fullmatch("<0x..>", piece.text):
            assert piece.text.lstrip("\u2581") == normalize(surface)
        else:
            assert int(piece.text[3:5], 16) in surface.replace("\0", "\ufffd").encode()


def test_bytes_of_one_character_share_its_span(spelling):
    text = "a ☃ b"
    bytes_of_snowman = [piece for piece in spelling.pieces(text) if piece.text.startswith("<0x")]
    assert [piece.text for piece in bytes_of_snowman] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert {text[piece.start : piece.end] for piece in bytes_of_snowman} == {"☃"}


def test_unknown_characters_are_unknown_and_read_as_such(plain):
    ids = plain.encode("The ☃.")
    assert ids.count(plain.unk) == 1
    assert plain.decode(ids) == "The  ⁇ ."


@given(ids=st.lists(st.integers(-5, 2000), max_size=30))
def test_decoding_never_fails(spelling, ids):
    special = [spelling.pad, spelling.bos, spelling.eos]
    outside = [id for id in ids if not 0 <= id < spelling.size]
    text = spelling.decode(ids)
    assert text == spelling.decode([id for id in ids if id not in special + outside])
    assert text == spelling.decode(np.array(ids, dtype=np.int64))


def test_text_is_one_line_even_where_a_line_feed_is_spelled(spelling):
    line_feed = spelling.encode("a☃b")[-2] - 0x83 + 0x0A  # bytes have one id after the other
    assert spelling.decode([*spelling.encode("a"), line_feed, *spelling.encode("b")]) == "a  b"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [60, 20_000])
def test_a_small_text_has_as_many_subwords_as_it_can(kind, size):
    vocabulary = Vocabulary.train(TEXT, VocabularyConfig(kind=kind, size=size))
    assert vocabulary.size <= size
    assert vocabulary.decode(vocabulary.encode(TEXT[0])) == TEXT[0]
    assert (vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos) == (0, 1, 2, 3)
    assert (Vocabulary.PAD, Vocabulary.UNK, Vocabulary.BOS, Vocabulary.EOS) == (0, 1, 2, 3)


@pytest.mark.parametrize("lines", [["a"], ["a\0b", "\0"], ["x" * 5_000_000], ["a\u2028b\r", "\ufffd"]])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_can_be_trained_on(lines, kind):
    vocabulary = Vocabulary.train(lines, VocabularyConfig(kind=kind, size=40))
    assert vocabulary.decode(vocabulary.encode(lines[0][:100])) == normalize(lines[0][:100])


def test_equal_lines_do_not_slow_training_down():
    """Sentencepiece is quadratic in how often a line is repeated: half a minute for 1,000 times."""
    started = time.perf_counter()
    Vocabulary.train(TEXT * 500, VocabularyConfig(size=150))
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_no_text_is_an_error(lines):
    with pytest.raises(DataError, match="no text to train subwords on"):
        Vocabulary.train(lines, VocabularyConfig())


def test_too_few_subwords_for_the_characters_are_an_error_with_both_numbers():
    with pytest.raises(ConfigError, match=r"vocabulary\.size = 8, but the characters of the text need at least 31"):
        Vocabulary.train(["abcdefghijklmnopqrstuvwxyz"], VocabularyConfig(size=8))


def test_an_error_of_the_text_itself_is_passed_on():
    def lines():
        yield "a line"
        raise DataError("a.de:2:1: not UTF-8")

    with pytest.raises(DataError, match=r"a\.de:2:1"):
        Vocabulary.train(lines(), VocabularyConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_repeatable(kind):
    config = VocabularyConfig(kind=kind, size=120)
    assert Vocabulary.train(TEXT, config).sha256 == Vocabulary.train(iter(TEXT), config).sha256


def test_training_is_silent(capfd):
    Vocabulary.train(TEXT, VocabularyConfig(size=120))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("unit", ["a", "\u0301", "日本語", "☃"])
def test_a_million_characters_without_a_space_take_under_five_seconds(spelling, unit):
    text = unit * (1_000_000 // len(unit))
    started = time.perf_counter()
    assert spelling.decode(spelling.encode(text)) == text
    assert time.perf_counter() - started < 5


def test_many_lines_encode_as_each_does(plain):
    assert plain.encode_all([*TEXT, "", "a\0b"]) == [plain.encode(line) for line in [*TEXT, "", "a\0b"]]
    assert plain.encode_all([]) == []


def test_sampling_gives_other_subwords_of_the_same_text(plain):
    ways = {tuple(plain.sample(TEXT[0], 0.1)) for _ in range(20)}
    assert len(ways) > 1
    assert {plain.decode(ids) for ids in ways} == {TEXT[0]}


def test_sampling_is_repeatable_by_its_seed(plain):
    first = plain.encode_all(TEXT, 0.1, "one")
    plain.sample(TEXT[0], 0.1)
    assert plain.encode_all(TEXT, 0.1, "one") == first
    assert plain.encode_all(TEXT, 0.1, "two") != first


def test_a_saved_vocabulary_is_the_same(plain, tmp_path):
    path = tmp_path / "v.model"
    path.write_text("an old one")
    plain.save(path)
    assert os.listdir(tmp_path) == ["v.model"]
    for loaded in (Vocabulary.load(path), Vocabulary.load(path, plain.sha256)):
        assert loaded.model == plain.model
        assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert loaded.encode(TEXT[0]) == plain.encode(TEXT[0])


def test_a_changed_vocabulary_is_refused_by_its_hash(plain, tmp_path):
    path = tmp_path / "v.model"
    path.write_bytes(plain.model[:-1] + bytes([plain.model[-1] ^ 1]))
    with pytest.raises(DataError, match=f"has hash .*, expected {plain.sha256}; it was changed or damaged"):
        Vocabulary.load(path, plain.sha256)


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def with_piece(model, piece):
    """Messages of one kind are merged by writing them one after the other."""
    entry = b"\x0a" + varint(len(piece)) + piece + b"\x15\0\0\0\0"
    return model + b"\x0a" + varint(len(entry)) + entry


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: b"", "cut short or not a sentencepiece model"),
        (lambda model: b"This is a text.\n" * 100, "cut short or not a sentencepiece model"),
        (lambda model: b"\xff" * 1000, "cut short or not a sentencepiece model"),
        (lambda model: with_piece(model, b"z" * 100_000), "has a piece of 100,009 bytes"),
        (lambda model: with_piece(model, b"z" * 2_100), "has a piece of 2,108 bytes"),
        (lambda model: with_piece(model, b""), "fails to load"),
        (lambda model: model + b"\x0a\x7f", "fails to load"),
    ],
    ids=["empty", "text", "noise", "long piece", "longer than any", "empty piece", "cut after the end"],
)
def test_a_damaged_vocabulary_is_rejected(plain, tmp_path, damage, message):
    path = tmp_path / "v.model"
    path.write_bytes(damage(plain.model))
    with pytest.raises(DataError, match=message) as error:
        Vocabulary.load(path)
    assert str(error.value).startswith(f"tokenizer rejected: {path} ")
    assert "\n" not in str(error.value)


def test_a_vocabulary_cut_anywhere_is_rejected_before_it_is_loaded(plain, tmp_path, monkeypatch):
    """Sentencepiece itself takes a model cut between two pieces for a smaller one."""
    model = plain.model
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # nobody gets as far as a child process
    for length in range(len(model)):
        with pytest.raises(DataError, match="cut short"):
            reject_unsafe_model(model[:length], tmp_path)


def test_a_native_crash_reads_as_rejection(plain, tmp_path, monkeypatch):
    """The child dies as it would of a segmentation fault inside the tokenizer."""
    crash = "import os, signal, sys; sys.stdin.buffer.read(); os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("rectiformer.text.vocabulary.PROBE", crash)
    plain.save(tmp_path / "v.model")
    with pytest.raises(DataError, match=r"tokenizer rejected: .*v\.model fails to load \(exit -11\)"):
        Vocabulary.load(tmp_path / "v.model")


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "not a file"), (".", "not a file"), ("missing", "no such file")):
        with pytest.raises(DataError, match=reason):
            Vocabulary.load(tmp_path / name)


def train_foreign(tmp_path, **options):
    from sentencepiece import SentencePieceTrainer

    prefix = str(tmp_path / "foreign")
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=prefix, vocab_size=62, minloglevel=2, **options
    )
    return tmp_path / "foreign.model"


def test_a_model_from_elsewhere_gets_the_symbols_it_lacks(tmp_path):
    """Sentencepiece's own defaults: unk 0, bos 1, eos 2 and no padding; T5 has no start either."""
    defaults = Vocabulary.load(train_foreign(tmp_path))
    assert (defaults.unk, defaults.bos, defaults.eos, defaults.pad, defaults.size) == (0, 1, 2, 62, 63)
    like_t5 = Vocabulary.load(train_foreign(tmp_path, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    assert (like_t5.pad, like_t5.eos, like_t5.unk, like_t5.bos, like_t5.size) == (0, 1, 2, 62, 63)
    assert like_t5.decode([like_t5.bos, *like_t5.encode("The dog"), like_t5.eos]) == "The dog"


def test_a_model_without_an_end_of_sentence_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer rejected: .*foreign\.model: it has no end-of-sentence piece"):
        Vocabulary.load(train_foreign(tmp_path, eos_id=-1))


def test_offsets_hold_under_normalization_from_elsewhere(tmp_path):
    """NFKC makes two letters of one ligature and one of two: offsets stay those of the line as it was."""
    vocabulary = Vocabulary.load(train_foreign(tmp_path, normalization_rule_name="nfkc", byte_fallback=False))
    text = "ﬁne e\u0301tude"
    covered = {index for piece in vocabulary.pieces(text) for index in range(piece.start, piece.end)}
    assert covered == set(range(len(text)))


def test_ids_are_stored_in_as_few_bytes_as_fit(plain, monkeypatch):
    for size, dtype in ((1 << 16, "<u2"), ((1 << 16) + 1, "<u4")):
        monkeypatch.setattr(plain, "size", size)
        assert plain.id_type == dtype
