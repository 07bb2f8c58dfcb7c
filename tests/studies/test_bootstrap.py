"""The paired bootstrap that spans processes is sacreBLEU's own."""

import random

import numpy as np
import pytest
import sacrebleu

from rectiformer.measure.bleu import compare
from rectiformer.studies.measures import (
    SAMPLES,
    SAMPLING_SEED,
    corpus_bleu,
    length_ratio,
    paired_p,
    resampled_bleu,
    sentence_counts,
)

WORDS = ["the", "a", "small", "old", "dog", "cat", "sees", "hears", "does", "not", "hide", "today", "here", ",", "."]


def sentences(seed, spoil=0.0):
    """Sixty lines of a seed, of which `spoil` of the words are others."""
    base, noise = random.Random(seed), random.Random(99)
    lines = [[base.choice(WORDS) for _ in range(base.randint(4, 20))] for _ in range(60)]
    return [" ".join(noise.choice(WORDS) if noise.random() < spoil else word for word in line) for line in lines]


def test_counts_of_sentences_add_up_to_the_score_of_the_corpus():
    hypotheses, references = sentences(1, 0.3), sentences(1)
    expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert 20 < expected < 80
    assert corpus_bleu(sentence_counts(hypotheses, references).sum(0)) == pytest.approx(expected)
    assert corpus_bleu(sentence_counts(["", "a"], ["the dog", "a"]).sum(0)) == pytest.approx(
        sacrebleu.corpus_bleu(["", "a"], [["the dog", "a"]]).score
    )


def test_the_length_ratio_is_that_of_sacrebleu():
    hypotheses, references = [line.rpartition(" ")[0] for line in sentences(1)], sentences(1)
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert length_ratio(sentence_counts(hypotheses, references)) == pytest.approx(expected.ratio)
    assert expected.ratio < 0.95


@pytest.mark.parametrize("spoil", [0.3, 0.31, 0.5])
def test_p_values_are_those_of_sacrebleu(spoil):
    references = sentences(1)
    systems = {"baseline": sentences(1, 0.3), "other": sentences(1, spoil)}
    baseline, other = compare(systems, references, samples=SAMPLES, seed=SAMPLING_SEED)
    samples = {name: resampled_bleu(sentence_counts(lines, references)) for name, lines in systems.items()}
    assert np.mean(samples["other"]) == pytest.approx(other.mean, abs=1e-3)
    difference = other.score.value - baseline.score.value
    assert paired_p(samples["other"], samples["baseline"], difference) == pytest.approx(other.p_value, abs=1e-9)
