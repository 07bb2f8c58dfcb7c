"""Alignments: weights against attention computed by hand, links against hand-made answers."""

import random

import numpy as np
import pytest
import torch

from rectiformer import VARIANTS
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, DataError
from rectiformer.measure.alignment import Links, alignment_error
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Piece, Vocabulary
from rectiformer.translate.align import (
    PairAttention,
    WordLinker,
    align_pairs,
    alignment_table,
    choose,
    cross_attention,
    cross_sites,
    find_peaks,
    observed,
)
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def vocabularies():
    return [Vocabulary.train(generate_lines(200, seed), VocabularyConfig(size=50 + seed)) for seed in (0, 9)]


def build_translator(vocabularies, variant="rela-g", order="post"):
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=16,
        num_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        ffn_size=16,
        tie_embeddings="none",
        variant=variant,
        norm=order,
    )
    model = Transformer(config, *(vocabulary.size for vocabulary in vocabularies)).double()
    return Translator(model, *vocabularies, max_length=80)


@pytest.fixture(scope="module")
def translator(vocabularies):
    return build_translator(vocabularies)


def weights_by_hand(translator, source, target):
    """Cross-attention of each layer [H, M, N] of one pair, from the layers' own projections."""
    model = translator.model.eval()
    source = torch.tensor([[*translator.source.encode(source), translator.source.eos]])
    x = model.target_embedding(torch.tensor([[translator.target.bos, *translator.target.encode(target)]]))
    context = model.encode(source, None).states
    layers = []
    for layer in model.decoder:
        middle = layer.around_attention(x, lambda x, layer=layer: layer.attention(x, causal=True))
        q, k, _ = layer.cross.project(middle, context, None)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        layers.append((scores.softmax(-1) if layer.cross.variant == "softmax" else scores.relu())[0].detach())
        x = layer(x, context, None)
    return layers


@pytest.mark.parametrize("variant", ["rela-g", "softmax"])
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_weights_are_those_of_the_model(vocabularies, variant, batch_tokens):
    translator = build_translator(vocabularies, variant)
    pairs = [*zip(generate_lines(7, 1), generate_lines(7, 2), strict=True), ("", "das"), ("das", ""), ("", "")]
    found = list(cross_attention(translator, pairs, batch_tokens, weights=True))
    assert [(each.source, each.target) for each in found] == pairs
    for each in found:
        M, N = len(each.target_pieces) + 1, len(each.source_pieces) + 1
        expected = weights_by_hand(translator, each.source, each.target)
        assert len(each.weights) == len(expected) == 2
        for weights, layer in zip(each.weights, expected, strict=True):
            assert weights.shape == (2, M, N)
            assert weights == pytest.approx(layer.numpy(), rel=1e-6, abs=1e-7)  # handed out in float32


def test_exact_zeros_stay_exact(translator):
    pairs = list(zip(generate_lines(7, 1), generate_lines(7, 2), strict=True))
    cells = np.concatenate(
        [layer.ravel() for pair in cross_attention(translator, pairs, weights=True) for layer in pair.weights]
    )
    assert 0.1 < (cells == 0).mean() < 0.9
    assert (cells >= 0).all()


def test_observers_are_given_back_whatever_happens(translator):
    sites = cross_sites(translator.model)
    mine = [].append
    sites[0].attention.observer = mine

    def observers():
        return [site.attention.observer for site in sites]

    iterator = cross_attention(translator, [("das", "das"), ("der", "der")], batch_tokens=1)
    next(iterator)
    assert observers() == [mine, None]  # between batches too: nobody has to finish the loop
    with pytest.raises(KeyError), observed(sites):
        raise KeyError
    assert observers() == [mine, None]
    sites[0].attention.observer = None


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if not variant.has_weights])
def test_attention_without_weights_says_so(vocabularies, variant):
    with pytest.raises(ArgumentError, match=f"cross-attention is '{variant}' in layer 1 of 2, which has no weights"):
        next(cross_attention(build_translator(vocabularies, variant), [("das", "das")]))


def pieces_at(*spans):
    return [Piece(0, "", start, end) for start, end in spans]


def hand_made(*heads):
    """ "Ein Wagenrad ." in four pieces against "A wheel." in three; the last row and column are the ends."""
    weights = np.array(heads, dtype=float)
    return PairAttention(
        "Ein Wagenrad .",
        "A wheel.",
        pieces_at((0, 3), (3, 9), (9, 12), (12, 14)),
        pieces_at((0, 1), (1, 7), (7, 8)),
        [find_peaks(weights, 4)],
        [weights],
    )


ONE = [[5, 1, 0, 0, 0], [0, 1, 2, 0, 0], [0, 0, 0, 1, 9], [0, 0, 0, 7, 0]]
OTHER = [[0, 0, 0, 0, 3], [0, 4, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("head", "induction", "links"),
    [
        (0, "normal", {(0, 0), (1, 1), (2, 2)}),  # the 9 of the source's end is no word; the 1 before it is
        (0, "shifted", {(1, 0), (2, 1), (2, 2)}),
        (1, "normal", {(1, 1)}),  # piece 0 sees the end only, piece 2 nothing at all
        (1, "shifted", {(1, 0), (0, 2)}),  # and piece 1 nothing
        ("average", "normal", {(0, 0), (1, 1), (2, 2)}),
        ("average", "shifted", {(1, 0), (2, 1), (2, 2)}),
    ],
)
def test_links_of_words_match_answers_by_hand(head, induction, links):
    assert WordLinker(hand_made(ONE, OTHER)).links(0, head, induction) == links


def test_tokenized_words_are_what_stands_between_spaces():
    linker = WordLinker(hand_made(ONE, OTHER), tokenized=True)
    assert linker.links(0, 0, "normal") == {(0, 0), (1, 1), (2, 1)}  # "wheel." is one word


@pytest.mark.parametrize(
    ("rows", "source"),
    [
        ([[1, 0, 0, 0, 0], [0, 3, 0, 0, 0]], 1),  # a vote of the heads would be a tie, which the first wins
        ([[2, 0, 0, 0, 0], [2, 3, 0, 0, 0]], 0),  # the largest weight of any head is the other
    ],
)
def test_the_average_is_the_mean_of_the_weights(rows, source):
    heads = [[row, *np.zeros((3, 5))] for row in rows]
    assert WordLinker(hand_made(*heads)).links(0, "average", "normal") == {(source, 0)}


def test_alignments_keep_the_order_around_empty_lines(translator):
    pairs = [("das Haus", "der Hund"), ("", ""), ("das", ""), ("", "das"), ("das Haus", "der Hund")]
    found = align_pairs(translator, pairs, layer=0, head="average")
    assert [bool(links) for links in found[1:4]] == [False, False, False]
    assert found[0] == found[4]


def test_the_table_holds_what_each_head_gives_alone(translator):
    pairs = list(zip(generate_lines(6, 1), generate_lines(6, 2), strict=True))
    gold = [Links(frozenset({(0, 0), (1, 1)}), frozenset({(1, 0)}))] * len(pairs)
    rows = alignment_table(translator, pairs, gold)
    assert [(row.layer, row.head, row.induction) for row in rows] == [
        (layer, head, induction)
        for layer in (0, 1)
        for head in (0, 1, "average")
        for induction in ("normal", "shifted")
    ]
    for row in rows:
        links = align_pairs(translator, pairs, layer=row.layer, head=row.head, induction=row.induction)
        assert row.score == alignment_error(links, gold)
    best = min(row.score.aer for row in rows)
    assert choose(rows).score.aer == best
    second = choose(rows, layer=1, head="average", induction="shifted")
    assert (second.layer, second.head, second.induction) == (1, "average", "shifted")
    of_layer = choose(rows, layer=1)
    assert of_layer.score.aer == min(row.score.aer for row in rows if row.layer == 1)
    assert len({row.score.aer for row in rows}) > 2
    with pytest.raises(ArgumentError, match="layer 7"):
        choose(rows, layer=7)


def test_gold_of_another_length_is_refused_before_anything_runs(translator):
    with pytest.raises(DataError, match="2 sentence pairs for 1 gold alignments"):
        alignment_table(translator, [("das", "das")] * 2, [Links(frozenset())])


@pytest.mark.parametrize(
    ("aligner", "message"),
    [
        ({"layer": 2}, "no decoder layer has index 2; there are 2, indices 0 to 1"),
        ({"layer": -1}, "no decoder layer has index -1"),
        ({"layer": "best"}, "no decoder layer has index 'best'"),
        ({"layer": 0, "head": 2}, 'no head has index 2; there are 2, indices 0 to 1, and "average"'),
        ({"layer": 0, "induction": "shfited"}, "unknown induction 'shfited'; did you mean 'shifted'"),
    ],
    ids=str,
)
def test_heads_that_do_not_exist_are_refused(translator, aligner, message):
    with pytest.raises(ArgumentError, match=message):
        align_pairs(translator, [("das", "das")], **aligner)
