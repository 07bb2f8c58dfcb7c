"""Feed-forward layers as memories, as ReLUFormer's paper has it: real trainings on the grammar, three seeds."""

from statistics import fmean

import pytest
import torch

from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.start import train

MEMORIES, SEEDS = ("relu", "softmax", "softmax-ln"), (1, 2, 3)
SETTINGS = (
    "data.sentences=8000",
    "data.valid_sentences=100",
    "vocabulary.size=600",
    "model.variant=softmax",
    "model.width=64",  # so narrow that the memories have to hold the words
    "model.slots=512",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.order=pre",
    "model.tie=target",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.slot_dropout=0",
    "training.steps=250",
    "training.tokens=600",
    "training.schedule=inverse-sqrt",
    "training.rate=3e-3",
    "training.warmup=80",
    "training.device=cpu",
    "validation.every=250",
    "checkpoint.every=250",
)


@pytest.fixture(scope="module")
def bleu(tmp_path_factory):
    """Validation BLEU of each memory, mean over seeds."""
    folder = tmp_path_factory.mktemp("memories")
    prepare(load_config(None, SETTINGS), folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more

    def score(memory, seed):
        run = folder / f"{memory}-{seed}"
        config = load_config(None, (*SETTINGS, f"model.memory={memory}", f"training.seed={seed}"))
        train(config, run, data=folder / "data")
        return next(record["valid_bleu"] for record in read_metrics(run / "metrics.jsonl") if "valid_bleu" in record)

    yield {memory: fmean(score(memory, seed) for seed in SEEDS) for memory in MEMORIES}
    torch.set_num_threads(threads)


def test_a_softmax_memory_is_below_relu_and_a_layer_norm_helps_it(bleu):
    """Seen: ReLU 24.7, softmax with LayerNorm 19.5, softmax 14.6. LayerNorm takes back half after so few updates; the
    paper has it take back all in the end."""
    assert bleu["softmax"] < bleu["softmax-ln"]
    assert bleu["softmax"] < bleu["relu"]
