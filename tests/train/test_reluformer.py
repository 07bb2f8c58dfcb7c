"""ReLUFormer learns as well as softmax does: a minute of real training on the built-in grammar."""

import pytest
import torch

from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.start import train

SETTINGS = (
    "data.sentences=12000",
    "data.valid_sentences=150",
    "model.width=64",
    "model.slots=128",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.order=pre",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.slot_dropout=0",
    "training.steps=600",
    "training.tokens=1000",
    "training.rate=2",
    "training.warmup=150",
    "training.ema=0.99",
    "training.device=cpu",
    "validation.every=600",
    "checkpoint.every=600",
)


@pytest.fixture(scope="module")
def bleu(tmp_path_factory):
    """Validation BLEU of a variant after training."""
    folder = tmp_path_factory.mktemp("reluformer")
    prepare(load_config(None, SETTINGS), folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more

    def score(variant):
        config = load_config(None, (*SETTINGS, f"model.variant={variant}"))
        train(config, folder / variant, data=folder / "data")
        return [
            record["valid_bleu"]
            for record in read_metrics(folder / variant / "metrics.jsonl")
            if "valid_bleu" in record
        ][-1]

    yield {variant: score(variant) for variant in ("softmax", "reluformer")}
    torch.set_num_threads(threads)


def test_reluformer_is_within_3_bleu_of_softmax(bleu):
    assert bleu["softmax"] > 75
    assert bleu["reluformer"] > bleu["softmax"] - 3
