"""Documents: segments equal their definition and cross no border, debates are joined, no text makes a boundary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.batches import BatchPlan, Symbols
from rectiformer.text.corpus import Counts, read_pairs
from rectiformer.text.documents import (
    build_segments,
    build_windows,
    halvings,
    join_ids,
    read_table,
    split_documents,
    split_ids,
)
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.text.vocabulary import SEPARATOR, Vocabulary

LENGTHS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=25)
HEADER = "doc\tlines\tdate\tsection\tspeech\n"


def starts_in(lengths, marks):
    """Document starts: 0, and those of `marks` that lie inside."""
    return sorted({0, *(mark for mark in marks if mark < len(lengths))}) if lengths else []


def cost(lengths, first, last):
    """Subwords of the larger side, one separator per sentence counted."""
    return max(sum(lengths[index][side] + 1 for index in range(first, last)) for side in (0, 1))


@given(LENGTHS, st.lists(st.integers(1, 24), max_size=4), st.integers(1, 40))
def test_segments_are_greedy_whole_and_inside_documents(lengths, marks, limit):
    starts = starts_in(lengths, marks)
    expected, first = [], 0
    for index in range(1, len(lengths) + 1):  # the definition: go on unless a document starts or it would be too long
        if index == len(lengths) or index in starts or cost(lengths, first, index + 1) > limit:
            expected.append((first, index))
            first = index
    assert build_segments(lengths, starts, [limit]) == expected
    for first, last in expected:
        assert last - first == 1 or cost(lengths, first, last) <= limit
        assert not any(first < start < last for start in starts)


def test_limits_are_taken_by_turns():
    lengths, starts = [(3, 3)] * 24, [0, 8, 16]
    segments = build_segments(lengths, starts, [16, 8])  # 4 subwords a sentence with its separator
    assert [last - first for first, last in segments] == [4, 4, *[2] * 4, 4, 4]
    assert halvings(1024) == [1024, 512, 256, 128, 64, 1]
    assert halvings(100) == [100, 1]
    assert halvings(40) == [1]


@given(st.lists(st.integers(1, 12), max_size=25), st.integers(1, 40), st.integers(0, 5))
def test_windows_cover_every_sentence_once_and_keep_to_the_limit(lengths, limit, overlap):
    windows = build_windows(lengths, limit, overlap)
    assert [index for window in windows for index in range(window.first, window.last)] == list(range(len(lengths)))
    for window in windows:
        assert 0 <= window.first - window.context <= overlap
        whole = sum(lengths[index] + 1 for index in range(window.context, window.last))
        assert whole <= limit or window.last - window.context == 1


@given(st.lists(st.integers(1, 12), max_size=25), st.integers(1, 40))
def test_windows_without_overlap_are_segments(lengths, limit):
    windows = build_windows(lengths, limit, 0)
    sides = [(length, length) for length in lengths]
    assert [(window.first, window.last) for window in windows] == build_segments(sides, [0], [limit])
    assert all(window.context == window.first for window in windows)


def test_context_is_as_much_as_fits_with_a_new_sentence():
    windows = build_windows([3, 3, 3, 9, 3], limit=16, overlap=2)  # 4, 4, 4, 10, 4 with separators
    assert [(window.context, window.first, window.last) for window in windows] == [(0, 0, 3), (2, 3, 4), (3, 4, 5)]


@given(st.lists(st.lists(st.integers(10, 20), max_size=4), min_size=1, max_size=6))
def test_ids_joined_are_split_again(sentences):
    assert split_ids(join_ids(sentences, 4), 4) == sentences


@pytest.mark.parametrize(
    ("documents", "lines", "expected"),
    [
        ("marker", ["<d>", "a", "", "<d>", "b"], [(["<d>"], ["a", ""]), (["<d>"], ["b"])]),
        ("marker", ["a", "<d>", "<d>"], [([], ["a"]), (["<d>", "<d>"], [])]),
        ("marker", [" <d>", None], [([], [" <d>", ""])]),
        ("marker", ["a\r", "<d>\r", "b\r"], [([], ["a\r"]), (["<d>\r"], ["b\r"])]),
        ("blank", ["", " ", "a", "<d>", "", "b"], [(["", " "], ["a", "<d>"]), ([""], ["b"])]),
        ("blank", ["a", None, "b"], [([], ["a", "", "b"])]),
        ("blank", [], []),
    ],
)
def test_lines_are_cut_into_documents(documents, lines, expected):
    found = list(split_documents(lines, documents))
    assert [(each.borders, each.sentences) for each in found] == expected


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_no_text_is_encoded_as_a_separator(kind):
    lines = [f"a line {number} with{SEPARATOR}in <d> {SEPARATOR}" for number in range(60)] + ["<s> </s> <sep"]
    words = Vocabulary.train(lines, VocabularyConfig(size=90, kind=kind), separator=True)
    assert words.separator is not None
    for line in [*lines, SEPARATOR, f"{SEPARATOR}{SEPARATOR}", f"x{SEPARATOR}y", "▁<sep>▁", "<\0sep>"]:
        assert words.separator not in words.encode(line)
        assert words.separator not in words.sample(line, 0.1)
    left, right = words.encode("a line"), words.encode("with")
    assert words.decode([*left, words.separator, *right]) == "a line with"


def test_a_vocabulary_has_a_separator_only_where_it_was_asked_for_one(tmp_path):
    words = Vocabulary.train(["so many words", "and some more"] * 5, VocabularyConfig(size=30))
    assert words.separator is None
    words.save(tmp_path / "words.model")
    config = Config(
        data=DataConfig(grammar="documents", sentences=40, valid_sentences=8, segment_length=64),
        vocabulary=VocabularyConfig(source_model=str(tmp_path / "words.model")),
    )
    message = r"words\.model has no control symbol <sep>, but data\.segment_length needs one"
    with pytest.raises(ConfigError, match=message):
        prepare(config, tmp_path / "data")


def test_text_spelled_like_the_separator_is_no_user_defined_piece(tmp_path):
    """A model in which text can spell the separator has none."""
    from sentencepiece import SentencePieceTrainer

    (tmp_path / "text").write_text("some words to choose from\n" * 20, encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "theirs"), vocab_size=30, minloglevel=2,
        hard_vocab_limit=False, user_defined_symbols=[SEPARATOR],
    )  # fmt: skip
    assert Vocabulary.load(tmp_path / "theirs.model").separator is None


def configure(**data):
    documents = {"grammar": "documents", "sentences": 200, "valid_sentences": 40}
    return Config(data=DataConfig(**documents | data), vocabulary=VocabularyConfig(size=400))


def test_the_grammar_gives_whole_documents():
    counts = Counts()
    pairs = list(read_pairs(configure(sentences=100).data, "train", counts))
    assert 100 <= len(pairs) == counts.pairs < 112
    assert sum(pair.document_start for pair in pairs) == counts.documents > 8
    assert pairs[0].document_start


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    return prepare(configure(segment_length=48), tmp_path_factory.mktemp("segments") / "data")


def test_segments_on_disk_are_the_sentences_joined(segmented, tmp_path):
    single = prepare(configure(segment_length=0), tmp_path / "data")
    separator, train = segmented.source.separator, segmented.train[0]
    assert single.source.sha256 == segmented.source.sha256, "a run of sentences can be started from by one of segments"
    sentences = prepare(configure(segment_length=0, grammar="sentences"), tmp_path / "sentences")
    assert sentences.source.separator is None
    texts = [(pair.source, pair.target) for pair in read_pairs(configure().data, "train", Counts())]
    for side, vocabulary in enumerate((segmented.source, segmented.target)):
        read = (train.source, train.target)[side]
        found = [vocabulary.decode(part) for pair in range(train.pairs) for part in split_ids(read(pair), separator)]
        assert found == [text[side] for text in texts]
    assert max(train.source_lengths.max(), train.target_lengths.max()) < 48  # an end, or separator, comes on top
    assert train.pairs < single.train[0].pairs / 3


def test_segments_start_where_documents_do(segmented):
    train, sentences = segmented.train[0], 0
    begins = set()
    for pair in range(train.pairs):
        if pair in train.document_starts:
            begins.add(sentences)
        sentences += len(split_ids(train.source(pair), segmented.source.separator))
    pairs = read_pairs(configure().data, "train", Counts())
    assert begins == {index for index, pair in enumerate(pairs) if pair.document_start}


def test_validation_segments_have_their_sentences(segmented):
    segments = segmented.valid_segments
    assert len(segments) == segmented.valid.pairs
    assert [source for sources, _ in segments for source in sources] == [source for source, _ in segmented.valid_text]
    for index, (sources, targets) in enumerate(segments):
        expected = join_ids(segmented.source.encode_all(sources), segmented.source.separator)
        assert segmented.valid.source(index).tolist() == expected
        assert len(targets) == len(sources)


def test_prepared_segments_open_again_and_say_so(segmented):
    again = Prepared.open(segmented.folder)
    assert again.segment_length == 48
    summary = again.manifest["splits"]["train-0"]
    assert summary["pairs"] == summary["counts"]["segments"] == again.train[0].pairs
    assert f" documents, {again.train[0].pairs} segments; " in Counts(**summary["counts"]).describe()
    assert np.array_equal(again.train[0].source(0), segmented.train[0].source(0))
    assert again.is_from(configure(segment_length=48))
    assert not again.is_from(configure(segment_length=64))


@pytest.mark.parametrize("tokens", [1, 20, 100])
def test_a_segment_longer_than_a_batch_is_one_of_its_own(segmented, tokens):
    words = segmented.source
    plan = BatchPlan(segmented.train, tokens, Symbols(words.pad, words.eos, words.pad, words.bos, words.eos), "x")
    seen = []
    for index in range(plan.first(1)):
        batch = plan.batch(index, static=True)
        assert batch.source.shape[0] == max(1, tokens // batch.source.shape[1])
        assert batch.source.shape[1] <= 48  # the end is counted in a segment's length
        seen += batch.pairs.tolist()
    assert sorted(seen) == list(range(segmented.train[0].pairs))


@pytest.mark.parametrize(
    ("too_long", "pairs", "words"),
    [("drop", 2, None), ("truncate", 3, None), ("error", 0, r"data\.segment_length = 12")],
)
def test_a_sentence_longer_than_a_segment_follows_too_long(tmp_path, too_long, pairs, words):
    lines = ["one two", "one two three four five six seven eight nine ten eleven twelve", "three"]
    (tmp_path / "a").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = DataConfig(
        source=(str(tmp_path / "a"),),
        target=(str(tmp_path / "a"),),
        documents="marker",
        segment_length=12,
        too_long=too_long,
    )
    config = Config(data=data, vocabulary=VocabularyConfig(size=40))
    if words:
        with pytest.raises(DataError, match=words):
            prepare(config, tmp_path / "data")
        return
    prepared = prepare(config, tmp_path / "data")
    separator = prepared.source.separator
    parts = [split_ids(prepared.train[0].source(pair), separator) for pair in range(prepared.train[0].pairs)]
    assert sum(map(len, parts)) == pairs
    assert prepared.train[0].source_lengths.max() < 12


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"segment_length": 64, "grammar": "sentences"}, 'use data.grammar = "documents", not "sentences"'),
        ({"segment_length": 64, "source": ("a",), "target": ("b",)}, "data.segment_length needs documents"),
        ({"source": ("a",), "target": ("b",), "document_tables": ("t",)}, "data.document_tables needs documents"),
        ({"source": ("a",), "target": ("b",), "documents": "blank", "document_tables": ("t", "u")}, "names 2 files"),
        ({"segment_length": 1, "grammar": "documents"}, "a sentence needs a subword and its separator"),
        ({"document_tables": ("t",)}, "data.document_tables names 1 files but data.source 0"),
    ],
)
def test_documents_that_cannot_be_are_refused(data, words):
    with pytest.raises(ConfigError) as caught:
        list(read_pairs(DataConfig(**data), "train", Counts()))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


SPEECHES = ["<d>", "a", "b", "<d>", "c", "<d>", "d", "e", "<d>", "f"]


def read_debates(folder, table, speeches=SPEECHES, **data):
    (folder / "text").write_text("\n".join(speeches) + "\n", encoding="utf-8")
    (folder / "table").write_text(table, encoding="utf-8")
    path = str(folder / "text")
    settings = {"documents": "marker", "document_tables": (str(folder / "table"),)} | data
    config = DataConfig(source=(path,), target=(path,), **settings)
    return [(pair.source, pair.document_start) for pair in read_pairs(config, "train", Counts())]


ROWS = HEADER + "0\t2\t1999\tx\t1\n1\t1\t1999\tx\t2\n2\t2\t1999\ty\t3\n3\t1\t2000\ty\t4\n"


def test_speeches_of_one_debate_are_one_document(tmp_path):
    found = read_debates(tmp_path, ROWS)
    assert "".join(text for text, _ in found) == "abcdef"
    assert [text for text, start in found if start] == ["a", "d", "f"]


def test_a_debate_that_comes_again_is_another_one(tmp_path):
    table = HEADER + "0\t2\t1999\tx\t1\n1\t1\t1999\ty\t2\n2\t2\t1999\tx\t3\n3\t1\t1999\tx\t4\n"
    assert [text for text, start in read_debates(tmp_path, table) if start] == ["a", "c", "d"]


def test_blank_lines_and_dropped_pairs_keep_the_count(tmp_path):
    speeches = ["", "a", "b", "", "", "c", "", "d", "e", "", "f"]
    assert [text for text, start in read_debates(tmp_path, ROWS, speeches, documents="blank") if start] == list("adf")
    speeches = [line if line != "b" else " " for line in SPEECHES]  # an empty pair is dropped, but it is a line
    assert [text for text, start in read_debates(tmp_path, ROWS, speeches) if start] == list("adf")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (ROWS.replace("0\t2\t", "0\t3\t"), "says document 1 has 3 lines, but in {} it has 2; give each document"),
        (ROWS.rpartition("3\t1")[0], "says document 4 has 0 lines, but in {} it has 1"),
        (ROWS + "4\t1\t2000\tz\t5\n", "table has more documents than {}, which has 4"),
        ("", "table:1: no column 'lines'; the first line must name lines, date, section"),
        ("lines\tdate\n", "no column 'section'"),
        (HEADER + "0\t2\n", "table:2: 2 columns, but its first line has 5"),
        (HEADER + "0\ttwo\t1999\tx\t1\n", "table:2: 'two' lines; write a whole number"),
    ],
)
def test_a_table_that_does_not_fit_is_one_clear_error(tmp_path, table, words):
    with pytest.raises(DataError) as caught:
        read_debates(tmp_path, table)
    assert words.format(tmp_path / "text") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_may_end_its_lines_with_cr_and_lf(tmp_path):
    table = "lines\tdate\tsection\r\n2\t1999\tx\r\n1\t1999\tx\r\n2\t1999\ty\r\n1\t2000\ty"
    assert [text for text, start in read_debates(tmp_path, table) if start] == ["a", "d", "f"]


def test_documents_without_lines_need_no_row_with_lines(tmp_path):
    (tmp_path / "table").write_text(HEADER + "0\t0\t1999\tx\t1\n1\t3\t1999\ty\t2\n", encoding="utf-8")
    assert list(read_table(str(tmp_path / "table"))) == [(3, "1999\ty")]
