"""The cost model says what docs/cost-model.md says, and its bytes are those that are handed to the collectives."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import cost_fits  # noqa: E402
import cost_model  # noqa: E402

DEFAULTS = SimpleNamespace(share=0.85, memory=4.8, near=450.0, far=50.0, gpus=1024, length=1 << 20)


def test_the_page_has_the_numbers_of_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cost_model.py"])
    cost_model.main()
    page = (ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")
    assert f"{cost_model.BEGIN}{capsys.readouterr().out}{cost_model.END}" in page


def test_costs_that_made_the_points_are_found():
    draw = np.random.default_rng(0)
    costs = np.array([1e-3, 2e-12, 0.0])
    rows = [(1.0, *draw.uniform(1e8, 1e12, 2)) for _ in range(12)]
    found = cost_fits.fit("made", [(row, float(costs @ row)) for row in rows], lambda index: index % 3 == 0)
    assert found.costs == pytest.approx(costs, rel=1e-9, abs=1e-18)
    assert (found.fitted, len(found.errors)) == (8, 4)
    assert max(map(abs, found.errors)) < 1e-9


@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_of_sharing_a_sequence_are_those_of_the_page(ranks):
    """docs/scaling.md, per number of B H N D in 16 bits: 6 + 6 and 4 + 4 + 8 W / (W - 1), times (W - 1) / W."""
    network = cost_fits.Network(hidden_size=64, ffn_size=1, encoder=1, decoder=0, vocabulary=0)
    found = cost_model.context_bytes(network, 1000, ranks)
    share = (ranks - 1) / ranks
    assert found["rectified"] == pytest.approx(share * 12 * 64_000)
    assert found["softmax"] == pytest.approx((share * 8 + 8) * 64_000)
    recomputed = cost_model.context_bytes(network, 1000, ranks, recompute=True)
    assert recomputed["rectified"] == pytest.approx(1.5 * found["rectified"])
    assert recomputed["softmax"] == pytest.approx(found["softmax"] + share * 4 * 64_000)


def test_weights_are_counted_as_the_model_has_them():
    from rectiformer.config import ModelConfig
    from rectiformer.model.transformer import Transformer

    config = ModelConfig(
        hidden_size=16, num_heads=2, encoder_layers=2, decoder_layers=3, ffn_size=40, tie_embeddings="target"
    )
    matrices = [each for each in Transformer(config, 7, 50).parameters() if each.dim() == 2]
    network = cost_fits.Network(hidden_size=16, ffn_size=40, encoder=2, decoder=3, vocabulary=50)
    assert network.weights == sum(each.numel() for each in matrices) - 7 * 16 - gates(config)


def gates(config):
    """Weights of norms that are matrices."""
    from rectiformer.model.attention import RectifiedAttention

    norm = RectifiedAttention(config.hidden_size, config.num_heads, config.variant).norm
    count = config.encoder_layers + 2 * config.decoder_layers
    return count * sum(each.numel() for each in norm.parameters() if each.dim() == 2)


def test_an_update_grows_with_tokens_and_length():
    _, machine = cost_model.report(DEFAULTS)
    short, more = (machine.seconds(cost_model.BILLION, 32, count, "rectified") for count in (100, 200))
    long = machine.seconds(cost_model.BILLION, 3200, 2, "rectified")
    assert short < more < 2 * short
    assert long > more
