"""What the tests of exports share: small trained runs, one per variant, and sentences that none of them has seen."""

import pytest

from rectiformer.text.grammar import draw_sentences
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.translator import Translator

SMALL = {
    "data.sentences": 3000,
    "data.valid_sentences": 20,
    "model.hidden_size": 64,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "model.ffn_size": 128,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.ffn_dropout": 0.0,
    "training.steps": 250,
    "training.batch_tokens": 800,
    "training.schedule": "inverse-sqrt",
    "training.learning_rate": 0.008,
    "training.warmup": 40,
    "training.label_smoothing": 0.0,
    "training.device": "cpu",
    "validation.every": 1000,
    "checkpoint.every": 1000,
}
"""Enough to write English sentences, though mostly not the right ones."""


def configure(variant):
    return load_config(None, [f"{key}={value}" for key, value in {**SMALL, "model.variant": variant}.items()])


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a small run, given its variant; each is trained once."""
    root, found = tmp_path_factory.mktemp("runs"), {}

    def run(variant):
        if not found:
            prepare(configure(variant), root / "data")
        if variant not in found:
            train(configure(variant), root / variant, data=root / "data")
            found[variant] = root / variant
        return found[variant]

    return run


@pytest.fixture(scope="session")
def translator(trained):
    """The translator of such a run."""
    return lambda variant: Translator.from_run(trained(variant), device="cpu", notice=lambda text: None)


@pytest.fixture(scope="session")
def held_out():
    return [pair.source for pair in draw_sentences(200, seed=3, split="test")]
