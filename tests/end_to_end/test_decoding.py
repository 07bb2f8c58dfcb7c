"""A trained run translates a line the same whatever is translated along with it, with or without a cache."""

import dataclasses
import warnings

import pytest
import torch
from recomputing import recomputing

from rectiformer import VARIANTS
from rectiformer.config import ModelConfig
from rectiformer.model.transformer import Transformer
from rectiformer.text.prepared import Prepared
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

SMALL = ModelConfig(hidden_size=32, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=32, tie_embeddings="none")
TRAINED = {"training_steps": 60, "training_learning_rate": 0.5, "validation_every": 99}


@pytest.fixture(scope="module")
def prepared(data):
    return Prepared.open(data)


def texts(translator, lines, options, size):
    return [found.text for found in translator.translate(lines, options, batch_sentences=size)]


def assert_same_text(translator, lines, options):
    """Also that there is something to be the same: lines of many lengths get translations that differ."""
    expected = texts(translator, lines, options, 64)
    assert len(set(expected)) > len(set(lines)) // 3
    assert [texts(translator, lines, options, size) for size in (1, 7)] == [expected] * 2
    translator.model = recomputing(translator.model)
    assert texts(translator, lines, options, 7) == expected


@pytest.mark.parametrize("variant", ["softmax", "rela-g", "sparsemax"])
def test_a_trained_run_translates_a_line_the_same_in_any_batch(launcher, data, prepared, tmp_path, variant):
    ended = launcher.train(tmp_path / "run", data=data, model_variant=variant, **TRAINED)
    assert ended.exit == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no checkpoint was validated
        translator = Translator.from_run(tmp_path / "run", device="cpu")
    lines = [" ".join(source.split()[:words]) for source, _ in prepared.valid_text for words in (2, 5, 8)]
    assert_same_text(translator, lines, SearchOptions(extra_length=2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_random_model_translates_a_line_the_same_in_any_batch(prepared, variant):
    torch.manual_seed(0)
    words = prepared.source
    model = Transformer(dataclasses.replace(SMALL, variant=variant), words.size, words.size, bos=words.bos)
    with torch.no_grad():
        model.output.mul_(4)  # an untrained model is near uniform; this one is sure of something
        model.output[words.eos].zero_()  # and does not end at once
    lines = [" ".join(source.split()[:count]) for source, _ in prepared.valid_text for count in (2, 9)]
    assert_same_text(Translator(model, words, words), lines, SearchOptions(beam=2, extra_length=0))
