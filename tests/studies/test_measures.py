"""Zeros by shape against a count by hand; the bootstrap across processes against sacreBLEU's."""

import random

import numpy as np
import pytest
import sacrebleu
import torch

from rectiformer.measure.bleu import compare
from rectiformer.model.attention import Observation
from rectiformer.studies.efficiency import Load, measure_speed
from rectiformer.studies.measures import (
    SAMPLES,
    SAMPLING_SEED,
    SHAPES,
    ShapeMeter,
    corpus_bleu,
    length_ratio,
    paired_p,
    resampled_bleu,
    sentence_counts,
)
from rectiformer.toml import load_config


def observe(M, N, shift, lengths=None, causal=False, B=2):
    """A call whose scores are the more often 0 the larger `shift` is."""
    torch.manual_seed(M + N)
    q, k = torch.randn(B, 2, M, 32) + shift, torch.randn(B, 2, N, 32) - shift
    call = {"causal": causal, **({} if lengths is None else {"key_lengths": torch.tensor(lengths)})}
    return Observation("rela", q, k, q, call)


@pytest.mark.parametrize("causal", [False, True])
def test_shares_are_those_of_a_count_by_hand(causal):
    seen = observe(37, 37, 0.8, causal=causal)
    meter = ShapeMeter()
    meter.update(seen, torch.ones(2, 37, dtype=torch.bool))
    found = meter.shares()
    assert 0 < found["tiles of 16"] < found["pages of 16"] < found["cells"] < 1
    weights = seen.weights().flatten(0, 1)
    visible = torch.ones_like(weights, dtype=torch.bool).tril() if causal else torch.ones_like(weights) > 0
    for shape, (height, width) in SHAPES.items():
        tiles = [
            (seen_part.any().item(), part.any().item())
            for rows, seen_rows in zip(weights.split(height, 1), visible.split(height, 1), strict=True)
            for columns, seen_columns in zip(rows.split(width, 2), seen_rows.split(width, 2), strict=True)
            for part, seen_part in zip(columns, seen_columns, strict=True)
        ]
        zeros = [not used for shown, used in tiles if shown]
        assert found[shape] == pytest.approx(sum(zeros) / len(zeros), abs=1e-5)


def test_padding_counts_nowhere():
    """A batch with padding has the counts of its sentences one by one."""
    seen, lengths, queries = observe(80, 70, 0.8, lengths=[70, 23]), [70, 23], [80, 31]
    together, apart = ShapeMeter(), ShapeMeter()
    together.update(seen, torch.arange(80) < torch.tensor(queries)[:, None])
    for row, (N, M) in enumerate(zip(lengths, queries, strict=True)):
        q, k = seen.q[row : row + 1, :, :M], seen.k[row : row + 1, :, :N]
        apart.update(Observation("rela", q, k, q, {}), torch.ones(1, M, dtype=torch.bool))
    assert (together.visible, together.zeros) == (apart.visible, apart.zeros)


@pytest.mark.gpu
def test_speed_is_measured_with_and_without_kernels():
    config = load_config(None, ["training.precision=bf16", "model.hidden_size=64"])
    load = Load(vocabulary=100, length=8, sentences=16, decoded=4, repeats=2, turns=2)
    found = measure_speed(config, ("softmax", "rela-g", "sparsemax"), load, torch.device("cuda"))
    assert list(found) == [f"{name} {how}" for name in ("softmax", "rela-g", "sparsemax") for how in ("fused", "plain")]
    assert all(0 < each < 1e4 for row in found.values() for each in row.values())


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
