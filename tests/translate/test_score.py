"""Forced decoding against the model itself, and evaluation."""

import math
import random

import pytest
import torch

import rectiformer.translate.evaluate as evaluate_module
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import DataError
from rectiformer.measure.bleu import score
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.evaluate import evaluate, score_pairs
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]
CLOSE = {"rel": 1e-9}  # in float64, where batches of other sizes round differently


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def translator():
    """Two vocabularies of unequal size, so that one taken for the other shows."""
    source, target = (Vocabulary.train(generate_lines(200, seed), VocabularyConfig(size=50 + seed)) for seed in (0, 9))
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=16, tie_embeddings="none"
    )
    return Translator(Transformer(config, source.size, target.size).double(), source, target, max_length=80)


def pairs_of(count):
    return list(zip(generate_lines(count, seed=1), generate_lines(count, seed=2), strict=True))


def score_by_hand(translator, source, target):
    """Step after step, one pair at a time, no padding anywhere."""
    model = translator.model.eval()
    source = torch.tensor([[*translator.source.encode(source), translator.source.eos]])
    scores, written = [], [translator.target.bos]
    with torch.inference_mode():
        for token in [*translator.target.encode(target), translator.target.eos]:
            logits = model(source, None, torch.tensor([written]))[0, -1]
            scores.append((logits[token] - logits.exp().sum().log()).item())
            written.append(token)
    return scores


@pytest.mark.parametrize(
    "pair", [("das Haus", "der Hund sieht"), ("", ""), ("das", ""), ("", "der"), ("\0", "a\u2028b")]
)
def test_scores_are_the_model_s_own(translator, pair):
    [found] = score_pairs(translator, [pair])
    assert found.token_scores == pytest.approx(score_by_hand(translator, *pair), **CLOSE)
    assert found.log_probability == pytest.approx(math.fsum(found.token_scores), **CLOSE)
    assert found.tokens == [*(piece.text for piece in translator.target.pieces(pair[1])), "</s>"]


@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
@pytest.mark.parametrize("positions", [3, 512])
def test_neither_batches_nor_padding_matter(translator, monkeypatch, batch_tokens, positions):
    monkeypatch.setattr(evaluate_module, "POSITIONS", positions)
    pairs = [*pairs_of(20), ("", ""), ("das", ""), *pairs_of(3)]
    found = score_pairs(translator, pairs, batch_tokens)
    for pair, each in zip(pairs, found, strict=True):
        assert each.token_scores == pytest.approx(score_by_hand(translator, *pair), **CLOSE)


def test_nothing_to_score_has_no_scores(translator):
    assert score_pairs(translator, []) == []


def test_a_search_scores_forced_tokens_alike(translator):
    pairs = pairs_of(20)
    sources, targets = zip(*pairs, strict=True)
    found = translator.translate(sources, SearchOptions(beam=1), prefixes=targets)
    for each, scored in zip(found, score_pairs(translator, pairs), strict=True):
        forced = len(scored.tokens) - 1  # without the end
        assert each.candidates[0].tokens[:forced] == scored.tokens[:forced]
        assert each.candidates[0].token_scores[:forced] == pytest.approx(scored.token_scores[:forced], rel=1e-5)


def test_a_pair_too_long_is_named(translator):
    with pytest.raises(DataError, match=r"pair 2: 1 source and \d{3} target subwords, but at most 80 are read at once"):
        score_pairs(translator, [("das", "das"), ("das", "Haus " * 100)])


def test_an_evaluation_scores_what_the_translator_gives(translator):
    sources, references = zip(*pairs_of(6), strict=True)
    options = SearchOptions(beam=1, extra_length=2)
    found = evaluate(translator, [*sources, ""], [*references, ""], options, metrics=("bleu", "chrf"))
    translations = translator.translate([*sources, ""], options)
    assert found.hypotheses == [each.text for each in translations]
    assert found.scores == score(found.hypotheses, [*references, ""], ("bleu", "chrf"))
    assert found.scores["bleu"].signature.startswith("nrefs:1|")
    assert found.tokens == sum(len(each.candidates[0].tokens) for each in translations)
    assert found.seconds > 0


@pytest.mark.parametrize(("sources", "references"), [(2, 1), (1, 2), (0, 0)])
def test_counts_that_differ_give_an_error_and_no_score(translator, sources, references):
    with pytest.raises(DataError, match=f"{sources} lines for {references} references"):
        evaluate(translator, ["das"] * sources, ["das"] * references, SearchOptions())


def test_a_model_that_never_ends_stops_at_the_limit(translator):
    """The end symbol is made impossible, as it may seem to a model after a few updates."""
    model = Transformer(translator.model.config, translator.source.size, translator.target.size)
    with torch.no_grad():
        model.decoder[-1].around_memory.norm.weight.zero_()
        model.decoder[-1].around_memory.norm.bias.fill_(1.0)
        model.output[translator.target.eos] = -100.0
    endless = Translator(model, translator.source, translator.target)
    lines = generate_lines(4)
    found = evaluate(endless, lines, lines, SearchOptions(beam=1, extra_length=5))
    assert found.tokens == sum(len(translator.source.encode(line)) + 5 for line in lines)
