"""Health: measures of known weights, heads that die, and a training that does not notice being observed."""

import math
from dataclasses import astuple

import pytest
import torch

from rectiformer.config import Config, DataConfig, ModelConfig, TrainingConfig, ValidationConfig, VocabularyConfig
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.weights import attention_stats
from rectiformer.runs.folder import create_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.terminal import Terminal
from rectiformer.text.batches import collate
from rectiformer.text.prepared import prepare
from rectiformer.train.loop import Trainer
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import StopRequest
from rectiformer.train.validation import (
    SiteHealth,
    attention_health,
    newly_dead,
    site_health,
    summarize_health,
)
from rectiformer.translate.evaluate import symbols_of

SMALL = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2, "ffn_size": 16}
CONFIG = Config(
    data=DataConfig(sentences=120, valid_sentences=12),
    vocabulary=VocabularyConfig(size=120),
    model=ModelConfig(**SMALL),
    training=TrainingConfig(steps=4, batch_tokens=200, device="cpu"),
    validation=ValidationConfig(every=2, sentences=2),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(CONFIG, tmp_path_factory.mktemp("health") / "data")


@pytest.fixture
def batch(prepared):
    return collate(prepared.valid, range(6), symbols_of(prepared))


def build(prepared, variant="rela-g"):
    torch.manual_seed(0)
    config = ModelConfig(**SMALL, variant=variant)
    return Transformer(config, prepared.source.size, prepared.target.size, bos=prepared.target.bos).eval()


def kill(attention, heads):
    """Keys that point one way and queries that point the other, in the first `heads` heads."""
    size = attention.embed_dim // attention.num_heads
    with torch.no_grad():
        for part, value in ((0, -100.0), (1, 100.0)):
            rows = slice(part * attention.embed_dim, part * attention.embed_dim + heads * size)
            attention.input_weight[rows] *= 0.01
            attention.input_bias[rows] = value


def assert_alike(found, expected, error):
    names, values = zip(*((astuple(each)[:1], astuple(each)[1:]) for each in (found, expected)), strict=True)
    assert names[0] == names[1]
    assert values[0] == pytest.approx(values[1], rel=error)


def test_numbers_are_those_of_known_weights():
    """Keys of an identity, so that the queries are the scores: one padded query, a null row, two keys, one key."""
    scores = torch.tensor([[[[3.0, 1.0, -1.0], [-1.0, -2.0, 0.0], [0.0, 2.0, -1.0], [9.0, 9.0, 9.0]]]])
    stats = attention_stats(scores, torch.eye(3)[None, None], "rela", scale=1.0)
    found = site_health(Site("cross", 1, RectifiedAttention(4, 1)), stats, torch.tensor([3]))
    share = torch.tensor([0.75, 0.25])
    entropy = -(share * share.log()).sum().item() / 2
    expected = SiteHealth("cross", 1, 1, 0, null_rate=1 / 3, mass=2.0, entropy=entropy, zeros=6 / 9)
    assert_alike(found, expected, 1e-6)


@pytest.mark.parametrize("heads", [0, 1, 4])
def test_dead_heads_are_counted_where_they_are(prepared, batch, heads):
    model = build(prepared)
    kill(model.decoder[1].cross, heads)
    found = {(site.kind, site.layer): site for site in attention_health(model, batch)}
    assert list(found) == [("encoder", 0), ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert [site.dead for site in found.values()] == [0, 0, 0, 0, heads]
    hit = found["cross", 1]
    assert hit.null_rate >= heads / 4
    if heads == 4:
        assert (hit.null_rate, hit.mass, hit.entropy, hit.zeros) == (1.0, 0.0, 0.0, 1.0)


def test_softmax_is_never_null_and_what_has_no_weights_is_left_out(prepared, batch):
    for site in attention_health(build(prepared, "softmax"), batch):
        assert (site.dead, site.null_rate, site.zeros) == (0, 0.0, 0.0)
        assert site.mass == pytest.approx(1.0, rel=1e-5)
        assert 0 < site.entropy < math.log(200)
    assert attention_health(build(prepared, "inhibitor"), batch) == ()
    assert summarize_health(()) == {}


def test_looking_changes_nothing(prepared, batch):
    model, seen = build(prepared), []
    model.encoder[0].attention.observer = seen.append
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert attention_health(model, batch) == attention_health(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [site.attention.observer for site in model.sites()] == [seen.append, *[None] * 4]
    assert not seen


def test_padding_changes_nothing(prepared):
    model = build(prepared)
    short, wide = (
        collate(prepared.valid, range(3), symbols_of(prepared), **how) for how in ({}, {"rows": 5, "length": 80})
    )
    for plain, padded in zip(attention_health(model, short), attention_health(model, wide), strict=True):
        assert_alike(padded, plain, 1e-4)


def test_a_death_is_told_once():
    known = {}

    def sites(*dead):
        return [SiteHealth("cross", layer, 4, number, 0, 0, 0, 0) for layer, number in enumerate(dead)]

    assert list(newly_dead(sites(0, 0), known)) == []
    assert list(newly_dead(sites(0, 1), known)) == ["1 of 4 heads of cross layer 2 attend to nothing"]
    assert list(newly_dead(sites(0, 1), known)) == []
    assert list(newly_dead(sites(0, 4), known)) == ["all 4 heads of cross layer 2 attend to nothing"]
    assert list(newly_dead(sites(0, 2), known)) == []
    assert list(newly_dead(sites(2, 3), known)) == [
        "2 of 4 heads of cross layer 1 attend to nothing",
        "3 of 4 heads of cross layer 2 attend to nothing",
    ]


class Witness(Reporter):
    def __init__(self):
        self.notes, self.records = [], []

    def note(self, text):
        self.notes.append(text)

    def validated(self, record):
        self.records.append(record)


def test_training_logs_health_and_warns_of_a_death(prepared, tmp_path):
    """The cross-attention of layer 1 starts dead, so that it gets no gradient and stays so."""
    witness = Witness()
    with StopRequest() as stop:
        run = create_run(tmp_path / "run", CONFIG, prepared.source, prepared.target, prepared.hash)
        trainer = Trainer(run, prepared, torch.device("cpu"), witness, stop)
        kill(trainer.model.decoder[1].cross, 4)
        trainer.run()
    warnings = [note for note in witness.notes if "attend to nothing" in note]
    assert warnings == ["step 2: all 4 heads of cross layer 2 attend to nothing"]
    logged = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "valid_loss" in record]
    assert [record["step"] for record in logged] == [2, 4] == [record["step"] for record in witness.records]
    for record in logged:
        assert [(site["kind"], site["layer"]) for site in record["valid_health"]][-1] == ("cross", 1)
        assert (record["valid_heads"], record["valid_dead_heads"]) == (20, 4)
        mean = sum(site["null_rate"] for site in record["valid_health"]) / 5
        assert record["valid_null_rate"] == pytest.approx(mean)


def test_the_terminal_shows_the_means(capsys):
    sites = [SiteHealth("encoder", 0, 4, 0, 0.25, 3.0, 1.5, 0.5), SiteHealth("cross", 0, 4, 2, 0.75, 1.0, 0.5, 0.9)]
    record = {"step": 7, "valid_loss": 1.5, "valid_bleu": 26.31, "valid_chrf": 55.0, "valid_seconds": 9}
    Terminal().validated({**record, **{f"valid_{name}": value for name, value in summarize_health(sites).items()}})
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "  attention: 50.0% of rows null, 2 of 8 heads dead, row mass 2, entropy 1.00, zeros 70.0%"
