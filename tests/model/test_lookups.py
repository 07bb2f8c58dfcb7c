"""Slots that are kept, product keys and experts: which slots a token finds, and what is computed for it."""

import math

import pytest
import torch
import torch.nn.functional as F
from model.plain_memory import (
    DENSE,
    PRODUCT,
    WIDTH,
    Recorder,
    build,
    plain_output,
    plain_weights,
    tokens,
    watch,
)

from rectiformer.model.memory import MEMORIES, KeyValueMemory


@pytest.mark.parametrize("keep", [1, 5, 16])
@pytest.mark.parametrize("name", ["topk", *PRODUCT])
def test_exactly_keep_slots_have_weight(name, keep):
    memory = build(name, keep=keep)
    with torch.no_grad():
        memory.lookup.key_bias.add_(20)  # all scores positive, so no relu takes one away
    _, weights = watch(memory, tokens(30))
    assert weights.count_nonzero(-1).unique().tolist() == [keep]


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 16], ids="keep={}".format)  # side is 4: below, at and above it
@pytest.mark.parametrize("name", PRODUCT)
def test_product_keys_find_the_best_slots(name, keep):
    memory, x = build(name, keep=keep), tokens(40)
    out, weights = watch(memory, x)
    torch.testing.assert_close(weights, plain_weights(memory, x))
    torch.testing.assert_close(out, plain_output(memory, x))


@pytest.mark.parametrize("slots", [1, 4, 9, 1024])
def test_product_keys_at_any_square(slots):
    memory, x = build("product-relu", slots=slots), tokens(10)
    torch.testing.assert_close(memory(x), plain_output(memory, x))


@pytest.mark.parametrize("name", PRODUCT)
def test_product_keys_never_score_all_slots(name):
    memory, x = build(name, slots=4096, keep=4), tokens(3)
    with torch.no_grad(), Recorder() as recorder:
        memory(x)
    assert "topk" in {call for call, _, _ in recorder.calls}
    assert max(math.prod(shape) for _, shape, _ in recorder.calls) < 4096


@pytest.mark.parametrize(("experts", "keep"), [(1, 1), (4, 1), (4, 4), (16, 3)])
def test_experts_follow_the_formula_at_any_size(experts, keep):
    memory, x = build("sigma-moe", experts=experts, keep=keep), tokens(3, 7)
    out, weights = watch(memory, x)
    torch.testing.assert_close(out, plain_output(memory, x))
    torch.testing.assert_close(weights, plain_weights(memory, x))


def test_experts_that_no_token_chose_are_not_computed():
    memory, x = build("sigma-moe", keep=2), tokens(6).abs()
    with torch.no_grad():
        memory.lookup.gate.copy_(torch.tensor([1.0, -1.0, 2.0, -2.0])[:, None].expand(-1, WIDTH))  # 0 and 2 win
        usual = memory(x)
        for unused in (1, 3):
            memory.lookup.keys[4 * unused : 4 * unused + 4] = math.nan
            memory.values[4 * unused : 4 * unused + 4] = math.nan
        with Recorder() as recorder:
            poisoned = memory(x)
    assert torch.equal(poisoned, usual)
    products = [shape for call, shape, _ in recorder.calls if call in {"mm", "addmm"}]
    assert sorted(products) == [(6, 4), (6, 4), (6, 4), (6, WIDTH), (6, WIDTH)]  # gate, keys twice, values twice


def test_unused_experts_get_zero_gradients():
    memory, x = build("sigma-moe", keep=1), tokens(6).abs()
    with torch.no_grad():
        memory.lookup.gate.copy_(torch.tensor([1.0, -1.0, -1.0, -1.0])[:, None].expand(-1, WIDTH))
    memory(x).square().sum().backward()
    assert memory.values.grad[:4].abs().sum() > 0
    assert memory.values.grad[4:].abs().sum() == 0
    assert memory.lookup.keys.grad[4:].abs().sum() == 0


def test_expert_dropout_zeroes_gates_in_training_only():
    memory, x = build("sigma-moe", keep=4, expert_dropout=0.25, bias=False), tokens(4000)
    gates = (x @ memory.lookup.gate.T).sigmoid()
    hidden = F.relu(x @ memory.lookup.keys.T).unflatten(-1, (4, 4))
    _, weights = watch(memory.train(), x)
    ratio = (weights.unflatten(-1, (4, 4)) / (gates[..., None] * hidden))[hidden > 0]  # 0 or 1: nothing is rescaled
    dropped = ratio == 0
    torch.testing.assert_close(ratio[~dropped], torch.ones_like(ratio[~dropped]))
    assert dropped.double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(memory.eval()(x), plain_output(memory, x))


def test_balance_is_the_negative_entropy_of_mean_expert_use():
    memory, x = build("sigma-moe"), tokens(3, 5)
    memory.train()(x)
    p = (x @ memory.lookup.gate.T).softmax(-1).mean((0, 1))
    torch.testing.assert_close(memory.balance(), (p * p.log()).sum())
    assert -math.log(4) < memory.balance() < 0
    memory.balance().backward()
    assert memory.lookup.gate.grad.abs().sum() > 0
    memory.eval()(x)
    assert memory.balance() == 0


def test_balance_survives_a_collapsed_gate():
    memory, x = build("sigma-moe"), tokens(5).abs()
    with torch.no_grad():
        memory.lookup.gate.copy_(torch.tensor([1e4, 0, 0, 0])[:, None].expand(-1, WIDTH))
    memory.train()(x)
    memory.balance().backward()
    assert memory.balance() == 0
    assert memory.lookup.gate.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "sigma-moe"])
def test_balance_is_zero_without_experts(name):
    memory = build(name)
    memory.train()(tokens(3))
    assert memory.balance() == 0


@pytest.mark.parametrize("slots", [1, 2, 7, 4096])
@pytest.mark.parametrize("name", DENSE)
def test_any_number_of_slots(name, slots):
    memory, x = build(name, slots=slots), tokens(5)
    assert memory.values.shape == (slots, WIDTH)
    torch.testing.assert_close(memory(x), plain_output(memory, x))


@pytest.mark.parametrize("layers", [1, 12])
def test_initial_experts_have_the_deviation_of_a_dense_layer(layers):
    memory = KeyValueMemory(64, 1024, "sigma-moe", layers=layers)
    deviation = math.sqrt(2 / (64 * layers))
    assert memory.lookup.keys.std().item() == pytest.approx(deviation, rel=0.05)
    assert memory.values.std().item() == pytest.approx(math.sqrt(2 / (1024 * layers)), rel=0.05)
    norms = memory.lookup.gate.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, deviation * 8))  # 8 = sqrt(64)
    assert memory.lookup.key_bias.count_nonzero() == 0
