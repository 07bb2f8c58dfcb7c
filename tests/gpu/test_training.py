"""Training steps of many shapes on a GPU: plain, captured as graphs and compiled, they give the same losses."""

import numpy as np
import pytest
import torch
from small_documents import SMALL_DOCUMENTS
from train.linked import write_corpus

from rectiformer.config import ModelConfig
from rectiformer.model.transformer import Transformer
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.recipes import OPEN, THRESHOLD, attention_settings
from rectiformer.text.batches import Batch
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.train.update import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch's and inductor's own warnings
SETTINGS = [
    *SMALL_DOCUMENTS,
    "data.segment_length=48",
    "data.sentences=600",
    "training.steps=24",
    "training.batch_tokens=400",
    "training.learning_rate=1e-3",
    "training.warmup=4",
    "training.ema=0.9",
    "validation.every=24",
    "checkpoint.every=24",
    "log.every=8",
]


GUIDED = [
    "vocabulary.size=300",
    "model.hidden_size=64",
    "model.num_heads=2",
    "model.ffn_size=64",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.guided_alignment=0.2",
    "training.steps=24",
    "training.batch_tokens=400",
    "training.learning_rate=1e-3",
    "training.schedule=inverse-sqrt",
    "training.warmup=4",
    "validation.every=24",
    "checkpoint.every=24",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "data"
    prepare(load_config(None, SETTINGS), folder)
    return folder


def losses(data, folder, *changes):
    train(load_config(None, [*SETTINGS, *changes]), folder, data=data)
    records = read_metrics(folder / "metrics.jsonl")
    return [record["nll"] for record in records if "nll" in record] + [
        record["valid_loss"] for record in records if "valid_loss" in record
    ]


CASES = {
    **{name: (f"model.variant={name}",) for name in ("softmax", "rela-g", "reluformer", "sparsemax")},
    f"{OPEN}, by sentence": (*attention_settings(OPEN), "model.positions=sentence"),
    f"{THRESHOLD}, by sentence": (*attention_settings(THRESHOLD), "model.positions=sentence"),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_captured_and_compiled_steps_give_the_losses_of_plain_ones(case, precision, data, tmp_path):
    settings = (*CASES[case], f"training.precision={precision}")
    plain, captured, compiled = (
        losses(data, tmp_path / how, *settings, f"training.compile={how}") for how in ("no", "capture", "yes")
    )
    assert plain[0] > plain[-2] > 0  # it learns
    # The roundings of an update differ by kernel, and grow from update to update as those of two seeds would.
    share = 2e-3 if precision == "fp32" else 2e-2
    assert captured == pytest.approx(plain, rel=share)
    assert compiled == pytest.approx(plain, rel=share)


@pytest.mark.parametrize(
    ("variant", "precision", "every", "compared"),
    [("softmax", "fp32", 8, 3), ("threshold", "fp32", 1, 2), ("rela-g", "fp32", 8, 3), ("rela-g", "bf16", 8, 3)],
)
def test_guided_alignment_is_the_same_captured_and_compiled(variant, precision, every, compared, tmp_path):
    """Losses and what one head learns of links; the layer of that head is not compiled, since it is observed.

    With `threshold` only two updates can be compared: a row that opens is normed to full size, so that a change of 1e-6
    in the weights becomes one of 1e-3 in the loss after three (of 1e-7 with softmax after 24; measured on a CPU).
    """
    settings = [*GUIDED, *write_corpus(tmp_path, pairs=600, valid=20)]
    settings += [f"model.variant={variant}", f"training.precision={precision}", f"log.every={every}"]
    prepare(load_config(None, settings), tmp_path / "data")
    found = {}
    for how in ("no", "capture", "yes"):
        config = load_config(None, [*settings, f"training.compile={how}"])
        train(config, tmp_path / how, data=tmp_path / "data")
        records = [each for each in read_metrics(tmp_path / how / "metrics.jsonl") if "nll" in each]
        found[how] = [[each[key] for each in records][:compared] for key in ("nll", "penalty")]
    assert records[0]["penalty"] > records[-1]["penalty"] > 0, "links are learned"
    share = 2e-3 if precision == "fp32" else 2e-2
    for how in ("capture", "yes"):
        for values, expected in zip(found[how], found["no"], strict=True):
            assert values == pytest.approx(expected, rel=share)


def test_graphs_of_many_shapes_hold_little_more_memory_than_a_step_needs():
    """A step of about as many tokens in each of 24 shapes, with tensors of up to 32 MiB."""
    config = load_config(None, ["model.variant=rela-g", "model.hidden_size=256", "training.precision=bf16"])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = Transformer(config.model, 8000, 8000).cuda()
    updater = Updater(model, config, torch.device("cuda"))
    held = torch.cuda.memory_reserved()
    for step, length in enumerate(range(16, 208, 8), start=1):
        rows = 1000 // length
        ids, lengths = torch.randint(4, 8000, (rows, length)), torch.full((rows,), length)
        updater.update(step, [Batch(np.arange(rows), ids, lengths, ids, ids, lengths, ids.numel())])
    assert updater.bad_step == -1
    needed = torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_reserved() < held + 2 * needed


@pytest.mark.parametrize("positions", ["sequence", "sentence"])
def test_a_longer_batch_leaves_graphs_with_the_positions_they_were_captured_with(positions):
    model = Transformer(
        ModelConfig(hidden_size=64, num_heads=2, dropout=0.0, positions=positions), 23, 23, 2, (4, 4)
    ).cuda()
    embedding = model.source_embedding
    ids = torch.randint(0, 23, (3, 40), device="cuda")
    graph, expected = torch.cuda.CUDAGraph(), embedding(ids)
    with torch.cuda.graph(graph):
        found = embedding(ids)
    embedding.reserve(4 * len(embedding.positions))
    torch.cuda.empty_cache()
    for rows in (512, 1024, 2048):  # memory that was given back is used again
        torch.full((rows, 64), torch.nan, device="cuda")
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
