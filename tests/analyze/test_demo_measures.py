"""A model of the demo's recipe, cut to a few steps: every measure vs. plain formulas over all its weights; and what
a document takes."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from analyze.dense import lengths_densely, look_densely, summarize_densely

from rectiformer import demo
from rectiformer.analyze.findings import analyze
from rectiformer.analyze.survey import shuffle_sources
from rectiformer.measure.alignment import Links
from rectiformer.text.grammar import draw_sentences
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.translator import Translator

CUT = ["data.sentences=1500", "data.valid_sentences=10", "training.steps=30", "training.warmup=20"]
CUT += ["validation.every=30", "validation.metric=loss", "checkpoint.every=30"]
DRAWN = list(draw_sentences(24, demo.TEST_SEED, "test"))
PAIRS = [(pair.source, pair.target) for pair in DRAWN]
GOLD = [Links(pair.sure, pair.possible) for pair in DRAWN]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """In float64: what is 0 does not depend on how a product was rounded."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    train(load_config(None, [*demo.SETTINGS, "model.variant=rela-g", *CUT]), folder)
    translator = Translator.from_run(folder, device="cpu")
    translator.model.double()
    return translator


@pytest.fixture(scope="module")
def found(translator):
    return analyze(translator, PAIRS, gold=GOLD, quality=False)


def rectified(kind, call):
    """ReLU of the scaled products, by hand: [H, M, N]."""
    weights = (call.q[0] @ call.k[0].mT / math.sqrt(call.q.shape[-1])).relu()
    return weights.tril() if kind == "decoder" else weights


@pytest.fixture(scope="module")
def weights(translator):
    """By kind and layer, of each pair."""
    return look_densely(translator, PAIRS, rectified)[0]


def test_heads_and_diversity_are_those_of_all_weights(found, weights):
    assert [(site.kind, site.layer) for site in found.sites] == list(weights)
    for site in found.sites:
        expected = summarize_densely(site.kind, weights[site.kind, site.layer])
        assert vars(site.diversity) == pytest.approx(expected.pop("diversity"), abs=1e-6)
        for name, values in expected.items():
            assert getattr(site, name) == pytest.approx(values, rel=1e-6, abs=1e-6), (site.kind, site.layer, name)
    for name in ("null_rate", "sparsity"):  # there is something to compare
        assert sum(0 < rate < 1 for site in found.sites for rate in getattr(site, name)) > 12


def test_lengths_are_those_of_all_weights(translator, found, weights):
    lengths = [len(translator.source.encode(source)) + 1 for source, _ in PAIRS]
    for each in found.by_length:
        for index, (start, stop) in enumerate(itertools.pairwise(each.lengths)):
            sentences = zip(lengths, weights[each.kind, each.layer], strict=True)
            inside = [sentence for length, sentence in sentences if start <= length < stop]
            measured = each.sparsity[index], each.null_rate[index], each.rows[index]
            assert measured == pytest.approx(lengths_densely(each.kind, inside), abs=1e-6)


def test_gold_and_shuffled_sources_are_those_of_all_weights(translator, found, weights):
    other = look_densely(translator, shuffle_sources(PAIRS), rectified)[0]
    for measured, dense in ((found.shuffled.gold, weights), (found.shuffled.shuffled, other)):
        for layer in range(2):
            masses = torch.cat([sentence.sum(-1).flatten() for sentence in dense["cross", layer]])
            assert measured.mass[layer] == pytest.approx(masses.mean().item(), rel=1e-6)
            assert measured.null_rate[layer] == pytest.approx((masses == 0).double().mean().item(), abs=1e-6)
    assert found.shuffled.gold != found.shuffled.shuffled


def words_of(text):
    """Characters to the number of their word; the grammar's only punctuation ends a word or a sentence."""
    words, number = {}, -1
    for index, character in enumerate(text):
        begins = not text[index - 1].isalnum() if index else True
        if character != " ":
            number += not character.isalnum() or begins
            words[index] = number
    return words


def covered(piece):
    """Its characters; the first bytes of one that is spelled as bytes have only their offset."""
    return range(piece.start, max(piece.end, piece.start + 1))


def link_by_hand(translator, pair, matrix, late):
    """Links (source word, target word) of the rows [M, N] of decoder steps."""
    (source, target), links = pair, set()
    sources, targets = (words_of(text) for text in pair)
    keys = translator.source.pieces(source)
    for index, piece in enumerate(translator.target.pieces(target)):
        row = matrix[index + late].tolist()[: len(keys)]
        if max(row) > 0:
            key = keys[row.index(max(row))]
            links |= {
                (sources[i], targets[j]) for i in covered(key) for j in covered(piece) if i in sources and j in targets
            }
    return links


def test_alignment_errors_are_those_of_all_weights(translator, found, weights):
    """All four panels: each head and the mean of heads, normal and shifted."""
    assert len(found.alignment) == 2 * 5 * 2
    assert len({row.aer for row in found.alignment}) > 10
    for row in found.alignment:
        hits, allowed, links, sure = 0, 0, 0, 0
        for pair, gold, layer in zip(PAIRS, GOLD, weights["cross", row.layer], strict=True):
            matrix = layer.float().mean(0) if row.head == "average" else layer[row.head].float()
            predicted = link_by_hand(translator, pair, matrix, row.induction == "shifted")
            hits, allowed = hits + len(predicted & gold.sure), allowed + len(predicted & (gold.sure | gold.possible))
            links, sure = links + len(predicted), sure + len(gold.sure)
        expected = 1 - (hits + allowed) / (links + sure), allowed / links if links else 1, hits / sure
        assert (row.aer, row.precision, row.recall) == pytest.approx(expected, abs=1e-6), row


@pytest.mark.slow
def test_a_document_of_2048_tokens_fits_and_its_weights_are_not_kept():
    """At the width, heads and slots of a base model, in a process of its own."""
    script = Path(__file__).with_name("measure_document.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    dense = 5 * 8 * seen["tokens"] ** 2 * 4  # five attentions of eight heads in float32
    assert seen["tokens"] == 2048
    assert seen["after"] < 4 << 30
    assert seen["after"] - seen["before"] < dense
