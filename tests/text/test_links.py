"""Word links in prepared data: the subwords of linked words, whatever the segmentation, and damage is seen."""

import numpy as np
import pytest

from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.errors import DataError
from rectiformer.measure.words import given_spans, merge_links, pieces_to_words, word_spans
from rectiformer.text.prepared import Prepared, prepare

SOURCE = ["Der alte Hund schläft.", "", "Ein kleines Haus", "Sie sieht (den) Fluss"] * 5
TARGET = ["The old dog sleeps.", "", "A small house", "She sees (the) river"] * 5
LINKS = ["0-0 1-1 2-2 3p3 4-4", "", "", "0-0 1-1 5-5 5-1"] * 5
"""The words of the last pair are Sie, sieht, (, den, ) and Fluss; between spaces, Fluss would be 3."""
KEPT = [0, 2, 3]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in {"a.de": SOURCE, "a.en": TARGET, "a.links": LINKS}.items():
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return tmp_path


def configure(vocabulary=None, **data):
    names = {"source": ("a.de",), "target": ("a.en",), "links": ("a.links",), "bad_utf8": "error"}
    return Config(data=DataConfig(**names | data), vocabulary=VocabularyConfig(**{"size": 50} | (vocabulary or {})))


def words_linked(prepared, copy, pair, source, target, spans):
    """The words that the linked subwords of a pair belong to."""
    sides = []
    rows = ((prepared.source, copy.source(pair), source), (prepared.target, copy.target(pair), target))
    for vocabulary, ids, text in rows:
        parts = [vocabulary._processor.id_to_piece(int(id)) for id in ids]
        ends = np.cumsum([len(part) for part in parts]) - 1  # the mark of the start is no character of the text
        starts = [max(0, end - len(part)) for end, part in zip(ends, parts, strict=True)]
        sides.append(pieces_to_words(list(zip(starts, ends.tolist(), strict=True)), spans(text)))
    return merge_links([(j, i) for i, j in copy.links.of(pair).tolist()], *sides)


@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_linked_subwords_are_those_of_the_linked_words(files, sampling):
    prepared = prepare(configure({"sampling": sampling, "copies": 3}), files / "data")
    assert len(prepared.train) == (3 if sampling else 1)
    cells = [copy.links.cells.tolist() for copy in prepared.train]
    assert sampling == 0 or cells[0] != cells[1], "other subwords, other cells"
    expected = [{(i, i) for i in range(5)}, set(), {(0, 0), (1, 1), (5, 5), (5, 1)}]
    for copy in prepared.train:
        assert copy.pairs == 15
        for pair in range(copy.pairs):
            line = KEPT[pair % 3]
            found = words_linked(prepared, copy, pair, SOURCE[line], TARGET[line], word_spans)
            assert found == expected[pair % 3]


def test_words_may_be_what_stands_between_spaces(files):
    (files / "a.links").write_text("\n".join(["0-0 1-1 2-2 3-3", "", "", "0-0 3-3"] * 5) + "\n")
    prepared = prepare(configure(link_words="spaces"), files / "data")
    assert words_linked(prepared, prepared.train[0], 2, SOURCE[3], TARGET[3], given_spans) == {(0, 0), (3, 3)}


def test_links_of_what_is_cut_off_are_left_out(files):
    whole = prepare(configure(), files / "whole").train[0]
    cut = prepare(configure(max_length=6, too_long="truncate"), files / "cut").train[0]
    for pair in range(whole.pairs):
        assert cut.links.of(pair).tolist() == [cell for cell in whole.links.of(pair).tolist() if max(cell) < 6]
    longer = np.maximum(whole.source_lengths, whole.target_lengths)
    middle = int(np.sort(longer[:3])[1])
    short = np.flatnonzero(longer <= middle)
    dropped = prepare(configure(max_length=middle), files / "dropped").train[0]
    assert 0 < dropped.pairs < whole.pairs
    assert [dropped.links.of(pair).tolist() for pair in range(dropped.pairs)] == [
        whole.links.of(pair).tolist() for pair in short
    ]


def test_links_are_part_of_the_data_and_of_the_format(files):
    plain = prepare(configure(links=()), files / "plain")
    linked = prepare(configure(), files / "linked")
    (files / "a.links").write_text("0-0\n" + "\n" * (len(LINKS) - 1))
    other = prepare(configure(), files / "other")
    assert (plain.manifest["format"], linked.manifest["format"]) == (1, 2)
    assert len({plain.hash, linked.hash, other.hash}) == 3
    assert plain.train[0].links is None
    assert not len(other.train[0].links.of(2))
    assert "links" not in plain.manifest["made_from"]["data"], "as in folders from before there were links"
    assert plain.is_from(configure(links=()))
    assert not linked.is_from(configure()), "the file has changed"
    assert other.is_from(configure())


def test_a_file_without_links_is_refused(files):
    (files / "a.links").write_text("\n" * len(LINKS))
    with pytest.raises(DataError, match=r"no word is linked in a\.links; leave data\.links out"):
        prepare(configure(), files / "data")


def test_cells_that_are_not_of_the_pairs_are_seen(files):
    prepare(configure(), files / "data")
    path = files / "data/train-0/links.cells"
    cells = np.fromfile(path, "<u2")
    cells[0] = 500
    cells.tofile(path)
    with pytest.raises(DataError, match=r"links\.cells: hash"):
        Prepared.open(files / "data")
    from rectiformer.text.links import CellLinks

    starts = np.fromfile(files / "data/train-0/links.starts", "<i8")
    train = Prepared.open(files / "data", verify=False).train[0]
    lengths = train.source_lengths, train.target_lengths
    assert not train.links.fit(*lengths, block=4)
    cells[0] = 0
    assert CellLinks(cells, starts).fit(*lengths, block=4)
    assert not CellLinks(cells[:-2], starts).fit(*lengths, block=4)
    assert not CellLinks(cells, starts[:-1]).fit(*lengths, block=4)
