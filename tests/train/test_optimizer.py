"""Rates, Adam and the moving average, against their formulas."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from rectiformer.config import TrainingConfig
from rectiformer.runs.folder import load_tensors
from rectiformer.train.optimizer import (
    MovingAverage,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)

STEPS = [1, 2, 99, 100, 101, 400, 5_050, 7_500, 7_501, 9_999, 10_000]
FORMULAS = {
    "noam": lambda step: 2.0 * 64**-0.5 * min(step**-0.5, step * 100**-1.5),
    "inverse-sqrt": lambda step: 2.0 * step / 100 if step <= 100 else 2.0 * math.sqrt(100 / step),
    "constant": lambda step: 2.0 * min(step / 100, 1),
    "linear": lambda step: 2.0 * min(step / 100, (10_000 - step) / 9_900),
    "cosine": lambda step: 2.0 * min(step / 100, (1 + math.cos(math.pi * max(0, step - 100) / 9_900)) / 2),
    "wsd": lambda step: 2.0 * min(step / 100, 1, (10_000 - step) / 2_500),
}
ENDING = ("linear", "cosine", "wsd")


@pytest.mark.parametrize("schedule", FORMULAS)
@pytest.mark.parametrize("step", STEPS)
def test_rates_follow_their_formulas(schedule, step):
    config = TrainingConfig(schedule=schedule, learning_rate=2.0, warmup=100, steps=10_000, decay_fraction=0.25)
    assert learning_rate(config, 64, step) == pytest.approx(FORMULAS[schedule](step), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("schedule", ENDING)
def test_schedules_that_end_do_so_at_the_last_update(schedule):
    config = TrainingConfig(schedule=schedule, learning_rate=0.5, warmup=10, steps=300)
    rates = [learning_rate(config, 64, step) for step in range(1, 311)]
    assert rates[298] > 0
    assert rates[299:] == [0.0] * 11


@pytest.mark.parametrize("warmup", [300, 400])
@pytest.mark.parametrize("schedule", ENDING)
def test_a_warm_up_as_long_as_the_training_only_rises(schedule, warmup):
    config = TrainingConfig(schedule=schedule, learning_rate=0.5, warmup=warmup, steps=300)
    assert [learning_rate(config, 64, step) for step in (1, 300)] == pytest.approx([0.5 / warmup, 150 / warmup])


def test_a_decay_that_would_begin_within_the_warm_up_begins_after_it():
    config = TrainingConfig(schedule="wsd", learning_rate=1.0, warmup=80, steps=100, decay_fraction=0.5)
    rates = [learning_rate(config, 64, step) for step in (79, 80, 81, 90)]
    assert rates == pytest.approx([79 / 80, 1.0, 19 / 20, 10 / 20])


@pytest.mark.parametrize("warmup", [1, 4000])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_the_rate_rises_to_the_end_of_the_warm_up_and_never_after(schedule, warmup):
    config = TrainingConfig(schedule=schedule, learning_rate=0.5, warmup=warmup, steps=9_000)
    top = 0.5 * 64**-0.5 * warmup**-0.5 if schedule == "noam" else 0.5
    rates = [learning_rate(config, 64, step) for step in range(1, warmup + 50)]
    assert rates[warmup - 1] == pytest.approx(top, rel=1e-12)
    assert max(rates) <= rates[warmup - 1] * (1 + 1e-12)
    assert all(before < after for before, after in itertools.pairwise(rates[:warmup]))
    assert all(before >= after for before, after in itertools.pairwise(rates[warmup - 1 :]))


def build(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 3), (5,), ()]]
    return parameters, build_optimizer(config, parameters)


def run(parameters, optimizer, steps):
    """Set gradients and rate that depend on the step alone, and update."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)
        optimizer.param_groups[0]["lr"].fill_(0.01 / step)
        optimizer.step()


def adam_by_hand(values, config, steps):
    """Adam in float64, as Kingma and Ba wrote it; decay of the weights as Loshchilov and Hutter wrote it."""
    values = [value.double() for value in values]
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, value in enumerate(values):
            gradient = (torch.randn(value.shape, generator=generator) * 10.0 ** (step % 5 - 3)).double()
            if config.optimizer == "adamw":
                value = value * (1 - 0.01 / step * config.weight_decay)
            else:
                gradient = gradient + config.weight_decay * value
            first[index] = config.beta1 * first[index] + (1 - config.beta1) * gradient
            second[index] = config.beta2 * second[index] + (1 - config.beta2) * gradient**2
            unbiased = first[index] / (1 - config.beta1**step), second[index] / (1 - config.beta2**step)
            values[index] = value - 0.01 / step * unbiased[0] / (unbiased[1].sqrt() + config.epsilon)
    return values


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_adam_is_the_papers(optimizer, weight_decay, epsilon):
    config = TrainingConfig(optimizer=optimizer, weight_decay=weight_decay, epsilon=epsilon)
    parameters, built = build(config)
    expected = adam_by_hand([parameter.detach() for parameter in parameters], config, range(1, 21))
    run(parameters, built, range(1, 21))
    torch.testing.assert_close([parameter.detach() for parameter in parameters], [value.float() for value in expected])


def test_a_restored_optimizer_goes_on_bit_for_bit():
    config = TrainingConfig()
    names = ["matrix", "vector", "number"]
    parameters, optimizer = build(config)
    run(parameters, optimizer, range(1, 6))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, names).items()}
    assert set(saved) == {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = build_optimizer(config, others)
    restore_optimizer(resumed, names, saved)
    for name, tensor in optimizer_tensors(resumed, names).items():
        assert torch.equal(tensor, optimizer_tensors(optimizer, names)[name])
    run(parameters, optimizer, range(6, 12))
    run(others, resumed, range(6, 12))
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


def test_an_optimizer_that_did_nothing_has_no_tensors():
    _, optimizer = build(TrainingConfig())
    assert optimizer_tensors(optimizer, ["matrix", "vector", "number"]) == {}


def build_average(decay=0.9):
    model = nn.Linear(3, 2)
    return model, MovingAverage(model, decay)


def test_the_moving_average_in_closed_form():
    """After n updates the start weighs decay^n, and what was seen k updates before the end (1 - decay) decay^k."""
    model, average = build_average()
    history = [model.weight.detach().double().clone()]
    for _ in range(12):
        with torch.no_grad():
            model.weight.normal_()
        average.update()
        history.append(model.weight.detach().double().clone())
    expected = 0.9**12 * history[0] + sum(0.1 * 0.9**age * history[12 - age] for age in range(12))
    torch.testing.assert_close(average.tensors()["weight"], expected.float())


def test_swapping_twice_is_nothing():
    model, average = build_average()
    with torch.no_grad():
        model.weight.normal_()
    weights, averages = copy.deepcopy(model.state_dict()), copy.deepcopy(average.tensors())
    average.swap()
    for name in ("weight", "bias"):
        assert torch.equal(model.state_dict()[name], averages[name])
        assert torch.equal(average.tensors()[name], weights[name])
    assert not torch.equal(model.weight, weights["weight"])
    average.swap()
    for name in ("weight", "bias"):
        assert torch.equal(model.state_dict()[name], weights[name])
        assert torch.equal(average.tensors()[name], averages[name])


def test_a_moving_average_is_restored_by_name():
    model, average = build_average()
    saved = {name: torch.randn_like(tensor) for name, tensor in average.tensors().items()}
    before = copy.deepcopy(model.state_dict())
    load_tensors(average.tensors(), dict(reversed(saved.items())), "it")
    assert all(torch.equal(average.tensors()[name], saved[name]) for name in saved)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(tensor.data_ptr() != saved[name].data_ptr() for name, tensor in average.tensors().items())


def test_a_tied_weight_is_averaged_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        model[0].weight.zero_()
        start = average.tensors()["0.weight"].clone()
    average.update()
    assert list(average.tensors()) == ["0.weight", "0.bias", "1.bias"]
    torch.testing.assert_close(average.tensors()["0.weight"], start / 2)
