"""Corpora with weights: each pair as often as its corpus says, by turns, in an order that anybody can compute again."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.errors import ConfigError
from rectiformer.text.batches import BatchPlan, Part, Symbols, padded_lengths
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.toml import load_config

SYMBOLS = Symbols(source_pad=90, source_end=91, target_pad=92, target_start=93, target_end=94)
WEIGHTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0.01, 0.3, 0.5, 1.0, 1.5, 2.0, 3.7])), min_size=1, max_size=4
)


class Corpus:
    """Pairs of many lengths, from corpora of given sizes and weights."""

    def __init__(self, *parts):
        sizes = [size for size, _ in parts]
        firsts = itertools.accumulate(sizes, initial=0)
        self.parts = [Part(first, size, weight) for first, (size, weight) in zip(firsts, parts, strict=False)]
        self.pairs = sum(sizes)
        self.source_lengths = np.array([1 + index * 7 % 23 for index in range(self.pairs)], dtype=np.int32)
        self.target_lengths = self.source_lengths[::-1].copy()

    def source(self, index):
        return np.full(self.source_lengths[index], 5)

    target = source


def plan(corpus, tokens=64, name="data"):
    return BatchPlan([corpus], tokens, SYMBOLS, name)


def epoch(batches, number):
    return [batches.pairs_of(index).tolist() for index in range(batches.first(number), batches.first(number + 1))]


def drawn(batches, epochs):
    """How often each pair was drawn."""
    pairs = itertools.chain.from_iterable(itertools.chain.from_iterable(epoch(batches, e) for e in range(epochs)))
    counts = Counter(pairs)
    return np.array([counts[pair] for pair in range(batches.corpora[0].pairs)])


@given(WEIGHTS.filter(lambda parts: sum(size for size, _ in parts)), st.integers(1, 7))
@settings(max_examples=50)
def test_every_pair_is_drawn_as_often_as_its_weight_says(parts, epochs):
    """After e epochs w * e times, rounded down or up; of each padded length floor(w * n * e) in all."""
    corpus = Corpus(*parts)
    counts, padded = drawn(plan(corpus), epochs), padded_lengths(corpus)
    for part in corpus.parts:
        own = slice(part.first, part.first + part.pairs)
        assert (np.abs(counts[own] - part.weight * epochs) < 1).all()
        for length in set(padded[own].tolist()):
            members = padded[own] == length
            assert counts[own][members].sum() == np.floor(part.weight * (members.sum() * epochs))


def test_weights_of_one_are_no_weights():
    plain = Corpus((300, 1.0))
    plain.parts = ()
    for parts in ([(300, 1.0)], [(100, 1.0), (0, 1.0), (200, 1.0)]):
        assert [epoch(plan(Corpus(*parts)), e) for e in range(3)] == [epoch(plan(plain), e) for e in range(3)]


def test_halves_of_a_corpus_take_turns():
    batches = plan(Corpus((400, 0.5), (100, 3.0)))
    first, second = ({pair for batch in epoch(batches, e) for pair in batch if pair < 400} for e in (0, 1))
    assert abs(len(first) - 200) < 10
    assert not first & second
    assert first | second == set(range(400))
    assert Counter(pair for batch in epoch(batches, 0) for pair in batch if pair >= 400) == dict.fromkeys(
        range(400, 500), 3
    )


def test_copies_of_a_pair_stand_apart():
    """500 pairs three times over in batches of a few: hardly ever twice in one."""
    twice = [len(batch) - len(set(batch)) for batch in epoch(plan(Corpus((500, 3.0))), 0)]
    assert sum(twice) < 0.1 * 1500


@given(WEIGHTS.filter(lambda parts: sum(size * weight for size, weight in parts) > 1), st.integers(0, 60))
@settings(max_examples=50)
def test_a_weighted_batch_depends_on_name_and_index_alone(parts, index):
    batches, expected = plan(Corpus(*parts)), plan(Corpus(*parts)).pairs_of(index)
    for other in (index + 9, 0, index):
        batches.pairs_of(other)
    assert np.array_equal(batches.pairs_of(index), expected)
    number, inside = batches.locate(index)
    assert batches.first(number) + inside == index < batches.first(number + 1)


@pytest.fixture
def three_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (
        ("a", ["der Hund\tthe dog"] * 30),
        ("b", ["ein Haus\ta house", "\tx"] * 5),
        ("c", ["Fluss\triver"] * 7),
    ):
        (tmp_path / name).write_text("".join(row + "\n" for row in rows))
    data = DataConfig(source=("a", "b", "c"), format="tsv")
    prepare(Config(data=data, vocabulary=VocabularyConfig(size=40)), tmp_path / "data")
    return tmp_path / "data"


def test_a_folder_counts_its_files_and_weights_them_later(three_files):
    prepared = Prepared.open(three_files)
    corpora = prepared.manifest["splits"]["train-0"]["corpora"]
    assert [entry["pairs"] for entry in corpora] == [30, 5, 7]
    for side in ("source_tokens", "target_tokens"):
        assert sum(entry[side] for entry in corpora) == prepared.manifest["splits"]["train-0"][side]
    prepared.set_weights((0.5, 2.0, 1.0))
    counts = drawn(BatchPlan(prepared.train, 64, SYMBOLS, "x"), 2)
    assert (counts[:30].sum(), counts[30:35].tolist(), counts[35:].tolist()) == (30, [4] * 5, [2] * 7)
    prepared.set_weights(())
    assert set(drawn(BatchPlan(prepared.train, 64, SYMBOLS, "x"), 1)) == {1}
    assert prepared.is_from(
        load_config(
            None, ['data.source=["a","b","c"]', "data.format=tsv", "vocabulary.size=40", "data.weights=[1,2,3]"]
        )
    )


def test_weights_that_do_not_fit_are_named(three_files):
    with pytest.raises(ConfigError, match=r"data\.weights has 2 numbers, but .*data was made from 3 files"):
        Prepared.open(three_files).set_weights((1.0, 2.0))
    with pytest.raises(ConfigError, match=r"data\.weights has 2 numbers but data\.source 3 files"):
        prepare(
            load_config(None, ['data.source=["a","b","c"]', "data.format=tsv", "data.weights=[1,2]"]), three_files / "x"
        )
    for wrong in ("[1, 0]", "[-1]", "[nan]", "[inf]"):
        with pytest.raises(ConfigError, match="each must be more than 0"):
            load_config(None, [f"data.weights={wrong}"])
    with pytest.raises(ConfigError, match="must be a list of numbers"):
        load_config(None, ["data.weights=['a']"])
