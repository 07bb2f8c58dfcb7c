"""A power that falls while training: which power an update has, what is refused, and that a stopped run ends alike."""

import pytest
import torch
from end_to_end.tiny import overrides

from rectiformer import attention_weights
from rectiformer.errors import ConfigError
from rectiformer.model.layers import find_score_bias
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import load_model, open_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.toml import load_config
from rectiformer.train.annealing import Annealing, falling
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import StoppedError
from rectiformer.train.start import train

ANNEALED = {
    "model_variant": "relu-exp",
    "training_anneal_from": 16,
    "training_steps": 12,
    "training_grad_accumulation": 1,
}


def configure(**changes):
    return load_config(None, overrides(**changes))


def build(config):
    return Transformer(config.model, 20, 20)


def test_large_powers_are_near_an_exponential():
    q, k = torch.randn(2, 1, 1, 5, 4).double()
    softmax = (q @ k.mT / 2).exp() / 5
    errors = [(attention_weights(q, k, "relu-exp", power=power) - softmax).abs().max() for power in (2, 16, 64)]
    assert errors[0] > 4 * errors[1] > 8 * errors[2]


def test_the_anneal_fraction_in_a_few_steps_to_that_of_the_model():
    assert falling(16, 2) == [16, 11, 8, 6, 4, 3]
    config = configure(**ANNEALED, training_anneal_fraction=0.5)
    annealing = Annealing(build(config), config.training)
    assert [annealing.at(step) for step in range(1, 9)] == [16, 11, 8, 6, 4, 3, None, None]


def test_every_update_has_its_power_and_validation_the_final_one(tmp_path, monkeypatch):
    seen = []
    anneal = Annealing.apply
    monkeypatch.setattr(Annealing, "apply", lambda self, power: (seen.append(power), anneal(self, power)))
    train(configure(**ANNEALED, validation_every=6), tmp_path / "run")
    assert seen == [16, 11, 8, 6, 4, 3, None, *[None] * 7]  # that of update 6 is followed by a validation's


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path):
    class Stop(Reporter):
        def advance(self, step):
            if step == 3:
                raise_signal()

    def raise_signal():
        import signal

        signal.raise_signal(signal.SIGTERM)

    config = configure(**ANNEALED)
    train(config, tmp_path / "straight")
    with pytest.raises(StoppedError):
        train(config, tmp_path / "stopped", reporter=Stop())
    train(config, tmp_path / "stopped", resume=True)
    logs = [
        [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in record]
        for name in ("straight", "stopped")
    ]
    assert logs[0] == logs[1]
    model, _ = load_model(open_run(tmp_path / "stopped"))
    assert next(model.sites()).attention.current_options() == {}  # the variant's own power


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_variant": "relu-exp", "training_anneal_from": 2}, "is not above the power of the model, 2"),
        (
            {**ANNEALED, "training_anneal_fraction": 0.05},
            "training.anneal_fraction = 0.05 of training.steps = 12 is less than one update",
        ),
        ({"training_anneal_from": 16}, "no attention of this model has a power that can fall.*relu-exp"),
        (
            {"model_attention_power": 3},
            "model.attention_power = 3, but attention is rela-g, which has no power.*relu-exp",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    config = configure(**changes)
    with pytest.raises(ConfigError, match=words):
        Annealing(build(config), config.training)


def test_the_power_of_the_model_is_the_attentions():
    model = build(configure(model_variant="relu-exp", model_attention_power=5))
    assert {site.attention.current_options()["power"] for site in model.sites()} == {5}


def test_attention_that_starts_open_needs_no_bias_to_be_open():
    config = configure(model_variant="relu-exp", model_score_bias="open").model
    assert find_score_bias(config, "relu-exp") == 0.0
    assert find_score_bias(config, "relu2") == 2.0
    assert find_score_bias(config, "threshold") is None
