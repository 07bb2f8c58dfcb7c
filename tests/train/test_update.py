"""One update: gradient and Adam of the formulas, the same whenever it is done again, none without finite numbers."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rectiformer.config import Config, ModelConfig, TrainingConfig
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Symbols, collate
from rectiformer.train.loss import penalties
from rectiformer.train.optimizer import optimizer_tensors
from rectiformer.train.update import Updater, micro_seed

SYMBOLS = Symbols(source_pad=0, source_end=1, target_pad=0, target_start=2, target_end=1)
WORDS = 19
CPU = torch.device("cpu")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}


class Corpus:
    """Random pairs of the given lengths."""

    def __init__(self, lengths):
        draw = np.random.default_rng(0)
        self.sides = [[draw.integers(3, WORDS, length) for length in side] for side in zip(*lengths, strict=True)]

    def source(self, index):
        return self.sides[0][index]

    def target(self, index):
        return self.sides[1][index]


def batch(*lengths, **shape):
    return collate(Corpus(lengths), np.arange(len(lengths)), SYMBOLS, **shape)


FIRST, SECOND = batch((5, 7), (4, 3), (2, 6)), batch((9, 2), (9, 4))


@pytest.fixture
def exact():
    """Everything in float64 but the sums of the loss: near its kinks a ReLU makes much of a rounding error."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(model_settings=NO_DROPOUT, **settings):
    """An updater whose Adam divides by at least 0.01, so that gradients of rounding size stay small."""
    training = {
        "schedule": "constant",
        "learning_rate": 0.01,
        "warmup": 1,
        "epsilon": 0.01,
        "compile": "no",
        **settings,
    }
    config = Config(
        model=ModelConfig(**{"hidden_size": 16, "num_heads": 2, "ffn_size": 16, **model_settings}),
        training=TrainingConfig(**training),
    )
    torch.manual_seed(0)
    updater = Updater(Transformer(config.model, WORDS, WORDS).train(), config, CPU)
    updater.optimizer.found_inf = updater.optimizer.found_inf.float()  # the one type that Adam takes
    return updater


def assert_close(actual, expected):
    """As near as float32, in which the loss is summed."""
    torch.testing.assert_close(actual.float(), expected.float())


def weights(updater):
    return torch.cat([parameter.detach().flatten() for parameter in updater.parameters])


def gradient(updater, *batches, step=1):
    """What an update finds, before clipping; the weights of this updater have moved afterwards."""
    updater.update(step, batches)
    return updater.flat_grad.clone()


def loss_by_hand(model, one, mean):
    """Smoothed cross-entropy over all words, by torch's own, summed over tokens or over sentences of token means."""
    logits = model(one.source, one.source_lengths, one.target_input)
    rows = [
        F.cross_entropy(logits[row, :length], one.target[row, :length], label_smoothing=0.1, reduction="none")
        for row, length in enumerate(one.target_lengths)
    ]
    return sum(row.sum() if mean == "token" else row.mean() for row in rows)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("mean", ["token", "sentence"])
@pytest.mark.parametrize("variant", ["softmax", "rela-g", "reluformer"])
def test_updates_are_the_formulas(variant, mean):
    updater = build({**NO_DROPOUT, "variant": variant}, label_smoothing_over="all", loss_mean=mean)
    model = copy.deepcopy(updater.model)
    first, second = (torch.zeros_like(weights(updater), dtype=torch.float64) for _ in range(2))
    for step in (1, 2, 3):
        loss = sum(loss_by_hand(model, one, mean) for one in (FIRST, SECOND))
        loss = loss / (FIRST.tokens + SECOND.tokens if mean == "token" else 5)
        found = torch.autograd.grad(loss, list(model.parameters()))
        found = torch.cat([part.flatten() for part in found])
        updater.update(step, [FIRST, SECOND])
        assert_close(updater.flat_grad, found)
        first, second = 0.9 * first + 0.1 * found, 0.98 * second + 0.02 * found.double() ** 2
        change = 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.98**step)).sqrt() + 0.01)
        moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - change.float()
        torch.nn.utils.vector_to_parameters(moved, model.parameters())
        assert_close(weights(updater), moved)


def test_the_rate_is_that_of_the_schedule():
    updater = build(schedule="inverse-sqrt", learning_rate=0.5, warmup=4)
    for step, rate in [(1, 0.125), (4, 0.5), (16, 0.25)]:
        updater.update(step, [FIRST])
        assert updater.optimizer.param_groups[0]["lr"].item() == rate


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("mean", ["token", "sentence"])
def test_accumulating_is_one_large_batch(mean):
    whole = batch((5, 7), (4, 3), (2, 6), (9, 2), (9, 4))
    parts = [
        collate(Corpus([(5, 7), (4, 3), (2, 6), (9, 2), (9, 4)]), np.array(rows), SYMBOLS)
        for rows in ([0], [1, 2, 3, 4])
    ]
    assert_close(gradient(build(loss_mean=mean), *parts), gradient(build(loss_mean=mean), whole))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("penalized", [{}, {"mass_penalty": 0.1, "entropy_penalty": 0.1}], ids=str)
@pytest.mark.parametrize("mean", ["token", "sentence"])
def test_rows_that_fill_a_shape_change_nothing(mean, penalized):
    plain, filled = batch((5, 7), (4, 3)), batch((5, 7), (4, 3), rows=5, length=12)
    settings = {"loss_mean": mean, **penalized}
    assert_close(gradient(build(**settings), filled), gradient(build(**settings), plain))


def test_an_update_depends_on_seed_and_step_and_on_nothing_before():
    def done(seed=1, step=4, wait=0):
        updater = build({}, seed=seed)
        torch.rand(wait)
        return gradient(updater, FIRST, SECOND, step=step)

    assert torch.equal(done(), done(wait=5))
    assert not torch.equal(done(), done(step=5))
    assert not torch.equal(done(), done(seed=2))


def test_each_micro_batch_has_its_own_random_numbers():
    once, twice = gradient(build({}), FIRST), gradient(build({}), FIRST, FIRST)
    assert not torch.allclose(once, twice)
    assert_close(gradient(build(), FIRST), gradient(build(), FIRST, FIRST))  # without dropout, the same
    seeds = {micro_seed(seed, step, index) for seed in (1, 11) for step in range(1, 20) for index in range(12)}
    assert len(seeds) == 2 * 19 * 12


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_without_a_finite_gradient_nothing_is_updated_any_more(bad):
    updater = build(clip_grad_norm=1.0)
    names = [name for name, _ in updater.model.named_parameters()]
    updater.update(1, [FIRST])
    updater.update(2, [FIRST])
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(updater.optimizer, names).items()}
    finite = updater.model.output[5, 0].item()
    for step, value in [(3, bad), (4, finite), (5, bad)]:  # finite again, but it is too late
        with torch.no_grad():
            updater.model.output[5, 0] = value
        before = weights(updater)
        updater.update(step, [FIRST, SECOND])
        assert torch.equal(weights(updater).nan_to_num(), before.nan_to_num())
        updater.read()
        assert updater.bad_step == 3
    for name, tensor in optimizer_tensors(updater.optimizer, names).items():
        assert torch.equal(tensor, state[name]), name


def test_clipping_shortens_the_gradient_and_reports_its_length():
    free = build()
    plain = gradient(free, FIRST)
    norm = free.read().grad_norm
    assert norm == pytest.approx(plain.norm().item(), rel=1e-6)
    clipped = build(clip_grad_norm=norm / 4)
    assert_close(gradient(clipped, FIRST), plain / 4)
    assert clipped.read().grad_norm == pytest.approx(norm, rel=1e-6)
    assert torch.equal(gradient(build(clip_grad_norm=norm * 4), FIRST), plain)


@pytest.mark.parametrize("mean", ["token", "sentence"])
def test_totals_are_means_since_they_were_read(mean):
    updater = build(loss_mean=mean, label_smoothing_over="all")
    expected = []
    for step in (1, 2, 3):
        logits = updater.model(FIRST.source, FIRST.source_lengths, FIRST.target_input)
        plain = F.cross_entropy(logits.mT, torch.where(FIRST.target > 0, FIRST.target, -100), reduction="sum")
        expected.append((loss_by_hand(updater.model, FIRST, mean).item(), plain.item()))
        updater.update(step, [FIRST])
    smoothed, plain = (sum(values) / 3 for values in zip(*expected, strict=True))
    held = updater.sums_so_far()
    assert (updater.updates, updater.bad_step) == (3, -1)
    totals = updater.read()
    assert totals.smoothed == pytest.approx(smoothed / (FIRST.tokens if mean == "token" else 3), rel=1e-5)
    assert totals.plain == pytest.approx(plain / FIRST.tokens, rel=1e-5)
    assert (totals.penalty, totals.tokens) == (0.0, 3 * FIRST.tokens)
    assert updater.read().tokens == updater.read().smoothed == 0
    updater.restore_sums(*held)
    assert updater.read() == totals


def penalty_gradient(updater, one, settings):
    """The gradient of the mean of the penalties over all attention, by observing it."""
    seen = []
    for site in updater.model.sites():
        site.attention.row_observer = lambda rows: seen.append(penalties(rows, None, settings))
    updater.model(one.source, None, one.target_input)
    parts = torch.autograd.grad(torch.stack(seen).mean(), updater.parameters, allow_unused=True)
    found = [torch.zeros_like(p) if part is None else part for p, part in zip(updater.parameters, parts, strict=True)]
    return torch.cat([part.flatten() for part in found])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("penalized", [{"mass_penalty": 0.5}, {"entropy_penalty": 2.0}], ids=str)
def test_penalties_add_their_gradient(penalized):
    model, full = {**NO_DROPOUT, "variant": "reluformer"}, batch((8, 8), (8, 8))
    extra = penalty_gradient(build(model), full, TrainingConfig(**penalized))
    assert extra.norm() > 1e-3
    updater = build(model, **penalized)
    assert_close(gradient(updater, full, full), gradient(build(model), full) + extra)
    assert updater.read().penalty > 0
    assert all(site.attention.row_observer is None for site in updater.model.sites())


@pytest.mark.usefixtures("exact")
def test_penalties_fall_with_their_warmdown():
    model, full = {**NO_DROPOUT, "variant": "reluformer"}, batch((8, 8), (8, 8))
    extra = penalty_gradient(build(model), full, TrainingConfig(mass_penalty=0.5))
    plain, settings = gradient(build(model), full), {"mass_penalty": 0.5, "steps": 8, "penalty_warmdown": 0.5}
    for step, strength in [(1, 1.0), (2, 0.75), (5, 0.0)]:
        assert_close(gradient(build(model, **settings), full, step=step), plain + strength * extra)


@pytest.mark.usefixtures("exact")
def test_the_balance_of_experts_adds_its_gradient():
    model = {**NO_DROPOUT, "memory": "sigma-moe"}
    other = build(model)
    other.model(FIRST.source, FIRST.source_lengths, FIRST.target_input)
    balance = sum(memory.balance() for memory in other.model.memories())
    parts = torch.autograd.grad(balance, other.parameters, allow_unused=True)
    extra = torch.cat(
        [
            (torch.zeros_like(p) if part is None else part).flatten()
            for p, part in zip(other.parameters, parts, strict=True)
        ]
    )
    assert extra.norm() > 1e-3
    updater = build(model, balance_penalty=3.0)
    assert_close(gradient(updater, FIRST), gradient(build(model), FIRST) + 3.0 * extra)
    assert updater.read().penalty == pytest.approx(3.0 * balance.item(), rel=1e-5)


def test_the_moving_average_follows_the_weights():
    updater = build(ema=0.75)
    start = weights(updater)
    updater.update(1, [FIRST])
    held = torch.cat([value.flatten() for value in updater.average.values])
    assert_close(held, 0.75 * start + 0.25 * weights(updater))


def test_bfloat16_products_err_no_more_than_a_model_of_bfloat16():
    narrow, wide = build(precision="bf16", label_smoothing_over="all"), build(label_smoothing_over="all")
    whole = copy.deepcopy(wide.model).bfloat16()
    parts = torch.autograd.grad(loss_by_hand(whole, FIRST, "token") / FIRST.tokens, list(whole.parameters()))
    exact = gradient(wide, FIRST)
    error = (gradient(narrow, FIRST) - exact).norm()
    assert 0 < error <= 2 * (torch.cat([part.flatten() for part in parts]) - exact).norm()
    assert {parameter.dtype for parameter in narrow.parameters} == {narrow.flat_grad.dtype} == {torch.float32}
    assert weights(narrow).isfinite().all()
