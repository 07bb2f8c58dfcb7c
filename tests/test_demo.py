"""The demonstration does what its text claims."""

import pytest
import torch

from rectiformer.config import load_config
from rectiformer.demo import NOTHING, draw_sentences, train_lookup


def test_answers_are_the_word_after_the_last_appearance():
    sentences, answers = draw_sentences(load_config(), 50, torch.Generator().manual_seed(0))
    for sentence, answer in zip(sentences.tolist(), answers.tolist(), strict=True):
        for position, word in enumerate(sentence):
            earlier = [index for index in range(position) if sentence[index] == word]
            assert answer[position] == (sentence[earlier[-1] + 1] if earlier else NOTHING)


def test_a_rectified_head_learns_the_task_and_switches_off():
    outcome = train_lookup(load_config(), "rela-g", lambda loss: None)
    assert outcome.accuracy > 0.99
    assert outcome.null_when_unknown > 0.5
    assert outcome.null_when_known == 0
    assert outcome.stats.sparsity.mean() > 0.8


def test_a_softmax_head_learns_it_and_never_does():
    outcome = train_lookup(load_config(), "softmax", lambda loss: None)
    assert outcome.accuracy > 0.99
    assert outcome.null_when_unknown == 0
    assert outcome.stats.mass.flatten().tolist() == pytest.approx([1.0] * outcome.stats.mass.numel(), abs=1e-5)
