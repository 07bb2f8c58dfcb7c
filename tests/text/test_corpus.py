"""Pairs of two files or of one: nothing is shifted, nothing vanishes uncounted, documents start where they should."""

from collections import Counter

import pytest

from rectiformer.config import DataConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.corpus import Counts, has_split, in_batches, read_pairs, sample_lines

LINES = {"source": "a.de", "target": "a.en"}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder, files, **keys):
    """Write the files, read the pairs: texts, document starts, counts."""
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    keys = {name: (value,) if name in ("source", "target") else value for name, value in keys.items()}
    counts = Counts()
    pairs = list(read_pairs(DataConfig(**keys), "train", counts))
    return [(pair.source, pair.target) for pair in pairs], [pair.document_start for pair in pairs], counts


def test_lines_are_paired_by_lf_alone(tmp_path):
    source, target = "\ufeffeins\u2028\r\nzwei\x85\ndrei", "one\ntwo\r\nthree\n"
    pairs, starts, counts = read(tmp_path, {"a.de": source, "a.en": target}, **LINES)
    assert pairs == [("eins\u2028\r", "one"), ("zwei\x85", "two\r"), ("drei", "three")]
    assert starts == [True, False, False]
    assert (counts.pairs, counts.documents) == (3, 1)


@pytest.mark.parametrize(
    ("source", "target", "numbers"),
    [
        ("a\nb\nc\n", "a\nb\n", ("3", "2", "3")),
        ("a\nb\n", "a\nb\nc\nd\ne\n", ("2", "5", "3")),
        ("a\n\nb\nc\n", "a\nb\nc\n", ("4", "3", "2")),
        ("a\n" + "b" * 99 + "\nc\n", "a\nb\nc\nd\n", ("3", "4", "2")),
        ("", "a\n", ("0", "1", "1")),
        ("a\u2028b\n", "a\nb\n", ("1", "2", "2")),
        ("a\nb\n", "a\rb\n", ("2", "1", "2")),
    ],
)
def test_unequal_files_are_an_error_with_both_counts(tmp_path, source, target, numbers):
    with pytest.raises(DataError) as error:
        read(tmp_path, {"a.de": source, "a.en": target}, **LINES)
    left, right, suspect = numbers
    assert str(error.value).startswith(f"a.de has {left} lines but a.en has {right}; first suspect line: {suspect};")
    assert error.value.exit_code == 3


def test_blank_sides_are_dropped_and_counted(tmp_path):
    files = {"a.de": "eins\n\n \t\u3000\r\ndrei\n\nvier\n", "a.en": "one\nx\ny\n \n\nfour\n"}
    pairs, _, counts = read(tmp_path, files, **LINES)
    assert pairs == [("eins", "one"), ("vier", "four")]
    assert (counts.pairs, counts.empty) == (2, 4)
    assert counts.describe() == "2 pairs in 1 documents; dropped 4 empty, 0 not UTF-8, 0 too long; truncated 0"


def test_pairs_that_are_not_utf8_are_dropped_and_counted(tmp_path):
    files = {"a.de": b"eins\nzw\xffei\ndrei\n", "a.en": b"one\ntwo\nthr\xffee\n"}
    pairs, _, counts = read(tmp_path, files, bad_utf8="skip", **LINES)
    assert pairs == [("eins", "one")]
    assert counts.bad_utf8 == 2
    with pytest.raises(DataError, match=r"a\.de:2:3: not UTF-8"):
        read(tmp_path, {}, **LINES)


def test_files_follow_each_other_and_each_must_match(tmp_path):
    files = {"a": "1\n2\n", "b": "3\n", "A": "one\ntwo\n", "B": "three\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    config = DataConfig(source=("a", "b"), target=("A", "B"))
    assert [pair.target for pair in read_pairs(config, "train", Counts())] == ["one", "two", "three"]
    crossed = DataConfig(source=("a", "b"), target=("B", "A"))  # as many lines in all
    with pytest.raises(DataError, match="a has 2 lines but B has 1"):
        list(read_pairs(crossed, "train", Counts()))


@pytest.mark.parametrize(
    ("documents", "source", "target", "texts", "starts", "empty"),
    [
        ("none", "a\n\n<d>\nb\n", "A\n\n<d>\nB\n", ["a", "<d>", "b"], [1, 0, 0], 1),
        ("blank", "a\nb\n\n \nc\n\nd\n", "A\nB\n\n\nC\nx\nD\n", ["a", "b", "c", "d"], [1, 0, 1, 0], 1),
        ("blank", "\n\na\n", "\n\nA\n", ["a"], [1], 0),
        ("blank", "a\n\n\xa0\nb\nc\n", "A\n\nx\n\nC\n", ["a", "c"], [1, 1], 2),
        ("marker", "<d>\na\n\n<d>\nb\n", "<d>\nA\n\n<d>\nB\n", ["a", "b"], [1, 1], 1),
        ("marker", "<d> \na\n", "x\nA\n", ["<d> ", "a"], [1, 0], 0),
        ("marker", "a\r\n<d>\r\nb\r\n", "A\n<d>\nB\n", ["a\r", "b\r"], [1, 1], 0),
    ],
)
def test_documents_start_where_the_text_says(tmp_path, documents, source, target, texts, starts, empty):
    files = {"a.de": source, "a.en": target}
    pairs, found, counts = read(tmp_path, files, documents=documents, **LINES)
    assert [left for left, _ in pairs] == texts
    assert found == [bool(start) for start in starts]
    assert (counts.documents, counts.empty) == (sum(starts), empty)


@pytest.mark.parametrize(("documents", "expected"), [("none", [True, False]), ("blank", [True, True])])
def test_a_file_starts_a_document_where_there_are_documents(tmp_path, documents, expected):
    for name in "abAB":
        (tmp_path / name).write_text("x\n")
    config = DataConfig(source=("a", "b"), target=("A", "B"), documents=documents)
    assert [pair.document_start for pair in read_pairs(config, "train", Counts())] == expected


def test_a_marker_on_one_side_only_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"a\.de:2 and a\.en:2: <d> on one side only"):
        read(tmp_path, {"a.de": "a\n<d>\nb\n", "a.en": "A\nB\n<d>\n"}, documents="marker", **LINES)


def test_columns_are_source_target_and_document(tmp_path):
    rows = "a\tA\tone\textra\n\tB\tone\n\nc\tC\ttwo\nd\tD\ttwo\ne\tE\tone\r\n"
    pairs, starts, counts = read(tmp_path, {"t.tsv": rows}, source="t.tsv", format="tsv", documents="column")
    assert pairs == [("a", "A"), ("c", "C"), ("d", "D"), ("e", "E")]
    assert starts == [True, True, False, True]
    assert counts.empty == 2


def test_columns_may_have_markers_and_blank_lines_between_documents(tmp_path):
    borders = (("marker", "<d>"), ("marker", "<d>\t<d>"), ("marker", "<d>\r"), ("blank", ""), ("blank", "\t"))
    for documents, border in borders:
        files = {"t.tsv": f"a\tA\n{border}\nb\tB\n"}
        _, starts, _ = read(tmp_path, files, source="t.tsv", format="tsv", documents=documents)
        assert starts == [True, True]


@pytest.mark.parametrize(
    ("row", "documents", "message"),
    [
        ("b", "none", "t.tsv:2: 1 columns, but 2 are needed"),
        ("b\tB", "column", "t.tsv:2: 2 columns, but 3 are needed"),
        ("<d>", "none", "t.tsv:2: 1 columns, but 2 are needed"),
    ],
)
def test_missing_columns_are_named(tmp_path, row, documents, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, {"t.tsv": f"a\tA\tx\n{row}\n"}, source="t.tsv", format="tsv", documents=documents)


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_no_pairs_at_all_is_an_error(tmp_path, content):
    with pytest.raises(DataError, match=r"no sentence pairs in a\.de, a\.en: 0 pairs in 0 documents; dropped"):
        read(tmp_path, {"a.de": content, "a.en": content}, **LINES)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": ("a",)}, "data.source names 1 and data.target 0 files; name one for each"),
        ({"target": ("a",)}, "data.source names 0 and data.target 1 files"),
        ({"source": ("a", "b"), "target": ("c",)}, "names 2 and data.target 1 files"),
        (
            {"source": ("a",), "target": ("b",), "valid_source": ("c",)},
            "data.valid_source names 1 and data.valid_target 0 files",
        ),
        ({"source": ("a",), "target": ("b",), "format": "tsv"}, "data.source holds both sides"),
        ({"source": ("a",), "target": ("b",), "documents": "column"}, 'needs data.format = "tsv"'),
        ({"source": ("-",), "target": ("-",)}, "named more than once"),
    ],
)
def test_files_that_cannot_belong_together_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        list(read_pairs(DataConfig(**keys), "train", Counts()))


def test_without_files_the_grammar_gives_both_splits():
    config = DataConfig(sentences=30, valid_sentences=10)
    train, valid = (list(read_pairs(config, split, Counts())) for split in ("train", "valid"))
    assert (len(train), len(valid)) == (30, 10)
    assert [pair.document_start for pair in valid] == [True] + [False] * 9
    assert all(pair.source.strip() and pair.target.strip() for pair in train + valid)
    assert train == list(read_pairs(config, "train", Counts()))


def test_validation_is_there_if_configured():
    assert has_split(DataConfig(), "valid")
    assert has_split(DataConfig(source=("a",), valid_source=("b",)), "valid")
    assert not has_split(DataConfig(source=("a",)), "valid")
    assert list(read_pairs(DataConfig(source=("a",), target=("b",)), "valid", Counts())) == []


def test_a_sample_of_lines_is_uniform_and_repeatable(tmp_path):
    """Of 10 lines 5 are drawn 400 times: each about 200 times, within 5 standard deviations of 10."""
    (tmp_path / "t").write_text("".join(f"{number}\t{number * 11}\n" for number in range(10)))
    drawn = Counter()
    for seed in range(400):
        config = DataConfig(source=("t",), format="tsv", seed=seed)
        sources, targets = sample_lines(config, 5, 1000)
        assert (sources, targets) == sample_lines(config, 5, 1000)
        assert [int(target) for target in targets] == [11 * int(source) for source in sources]
        assert len(set(sources)) == 5
        drawn.update(sources)
    assert all(150 <= drawn[str(number)] <= 250 for number in range(10))


def test_a_sample_holds_all_lines_of_a_small_file_cut_short(tmp_path):
    (tmp_path / "t").write_text("aaaa\tbb\nc\tdddd\n")
    assert sample_lines(DataConfig(source=("t",), format="tsv"), 5, 3) == (["aaa", "c"], ["bb", "ddd"])


def test_batches_of_pairs_are_bounded_by_number_and_by_length(tmp_path, monkeypatch):
    monkeypatch.setattr("rectiformer.text.corpus.BATCH_PAIRS", 3)
    monkeypatch.setattr("rectiformer.text.corpus.BATCH_CHARACTERS", 10)
    (tmp_path / "t").write_text("a\tb\n" * 4 + "aaaaaaa\tbbbb\n" + "a\tb\n" * 2)
    pairs = list(read_pairs(DataConfig(source=("t",), format="tsv"), "train", Counts()))
    batches = list(in_batches(pairs))
    assert [len(batch) for batch in batches] == [3, 2, 2]
    assert [pair for batch in batches for pair in batch] == pairs
