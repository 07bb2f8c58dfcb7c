"""Every row of MEMORIES against its formula written out plainly, and what must hold for all rows alike."""

import copy
import math
import pickle

import pytest
import torch
from model.plain_memory import (
    DENSE,
    PRODUCT,
    SLOTS,
    WIDTH,
    Recorder,
    build,
    every_bias,
    every_memory,
    plain_output,
    plain_scores,
    plain_weights,
    tokens,
    watch,
)
from torch import nn

from rectiformer.errors import ConfigError, ShapeError
from rectiformer.model.memory import MEMORIES, KeyValueMemory


def test_rows_say_what_they_are():
    for name, row in MEMORIES.items():
        assert row.name == name
        assert row.use.endswith(".")
        assert all(text and "\n" not in text for text in (row.formula, row.paper, row.use))


@every_bias
@every_memory
def test_output_and_weights_follow_the_formula(name, bias):
    memory, x = build(name, bias=bias), tokens(2, 5)
    out, weights = watch(memory, x)
    torch.testing.assert_close(out, plain_output(memory, x))
    torch.testing.assert_close(weights, plain_weights(memory, x))


@every_memory
def test_bias_false_leaves_only_matrices_and_norms(name):
    memory = KeyValueMemory(WIDTH, SLOTS, name, bias=False)
    norms = {"lookup.norm.weight", "lookup.norm.bias", "norm.weight", "norm.bias"}
    names = {part for part, _ in memory.named_parameters()} - norms
    assert names == {"values", "lookup.keys"} | ({"lookup.gate"} if name == "sigma-moe" else set())


@every_memory
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_axes(name, shape):
    memory, x = build(name), tokens(*shape)
    out, weights = watch(memory, x)
    assert out.shape == (*shape, WIDTH)
    assert weights.shape == (*shape, SLOTS)
    torch.testing.assert_close(out.reshape(-1, WIDTH), memory(x.reshape(-1, WIDTH)))


@every_memory
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_tokens(name, shape):
    memory, x = build(name), tokens(*shape).requires_grad_()
    out, weights = watch(memory, x)
    assert out.shape == (*shape, WIDTH)
    assert weights.shape == (*shape, SLOTS)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert memory.values.grad.abs().sum() == 0
    assert memory.balance() == 0


def test_relu_is_the_usual_feed_forward_layer():
    memory, x = build("relu", dtype=torch.float32), tokens(4, 5, dtype=torch.float32)
    usual = nn.Sequential(nn.Linear(WIDTH, SLOTS), nn.ReLU(), nn.Linear(SLOTS, WIDTH))
    with torch.no_grad():
        usual[0].weight.copy_(memory.lookup.keys)
        usual[0].bias.copy_(memory.lookup.key_bias)
        usual[2].weight.copy_(memory.values.T)
        usual[2].bias.copy_(memory.value_bias)
    torch.testing.assert_close(memory(x), usual(x))


@pytest.mark.parametrize("name", ["softmax", "softmax-ln", "product-softmax"])
def test_softmax_weights_sum_to_one(name):
    _, weights = watch(build(name, dtype=torch.float32), tokens(50, dtype=torch.float32))
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


@pytest.mark.parametrize("slots", [16, 4096])
def test_softmax_ln_starts_with_mean_zero_and_variance_one(slots):
    memory = KeyValueMemory(64, slots, "softmax-ln")
    out = memory(torch.randn(30, 64))
    torch.testing.assert_close(out.mean(-1), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(30), atol=1e-3, rtol=0)


def test_softmax_is_small_next_to_relu():
    x = torch.randn(100, 64)
    spread = {name: KeyValueMemory(64, 1024, name)(x).var().item() for name in ("relu", "softmax")}
    assert spread["softmax"] < 1e-3 * spread["relu"]


@pytest.mark.parametrize("name", ["relu", "relu2", "topk", "product-relu", "sigma-moe"])
def test_rectified_memory_without_a_match_gives_the_output_bias(name):
    memory = build(name)
    with torch.no_grad():
        memory.lookup.key_bias.fill_(-100)
    out, weights = watch(memory, tokens(5))
    assert weights.count_nonzero() == 0
    assert torch.equal(out, memory.value_bias.expand(5, -1))


@every_memory
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))], ids=["copy", "pickle"]
)
def test_a_module_can_be_copied_between_forward_and_backward(name, duplicate):
    memory, x = build(name), tokens(3)
    out = memory.train()(x)
    twin = duplicate(memory)
    assert torch.equal(twin(x), out)
    assert twin.values is not memory.values


@every_memory
def test_tokens_are_independent_of_their_batch(name):
    memory, x = build(name), tokens(7)
    together = memory(x)
    for index, token in enumerate(x):
        torch.testing.assert_close(memory(token), together[index])


@every_memory
def test_token_gradients_stay_with_their_token(name):
    memory, x = build(name), tokens(5).requires_grad_()
    memory(x)[2].sum().backward()
    assert x.grad.abs().sum(-1).nonzero().flatten().tolist() == [2]


@every_memory
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients(name, check):
    memory, x = build(name, width=4, slots=4), torch.randn(3, 4, dtype=torch.float64)
    ranked = [plain_scores(memory, x)] + ([x @ memory.lookup.gate.T] if name == "sigma-moe" else [])
    gaps = [scores.sort(-1).values.diff(dim=-1).min() for scores in ranked]
    assert min(ranked[0].abs().min(), *gaps) > 1e-4, "too near a kink or a tie for finite differences"
    names, parts = zip(*memory.named_parameters(), strict=True)

    def call(x, *parts):
        return torch.func.functional_call(memory, dict(zip(names, parts, strict=True)), x)

    assert check(call, (x.requires_grad_(), *parts))


@every_memory
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(name, dtype):
    memory, x = build(name, dtype=dtype), tokens(20, dtype=dtype).requires_grad_()
    out, weights = watch(memory, x)
    out.sum().backward()
    assert (out.dtype, weights.dtype, x.grad.dtype) == (dtype, dtype, dtype)
    assert out.isfinite().all()
    assert all(part.grad.isfinite().all() for part in memory.parameters())
    exact = plain_output(copy.deepcopy(memory).double(), x.double())
    error = (out - exact).abs().max(-1).values
    assert error.median() < 0.05  # the median: a tie broken otherwise in 16 bits chooses another slot


@pytest.mark.parametrize("name", ["softmax", "softmax-ln", "product-softmax"])
def test_softmax_of_16_bits_is_computed_in_32(name):
    memory, x = build(name, dtype=torch.bfloat16), tokens(50, dtype=torch.bfloat16)
    with Recorder() as recorder:
        memory(x)
    assert [dtype for call, _, dtype in recorder.calls if call == "_softmax"] == [torch.float32]


@every_memory
def test_autocast(name):
    memory, x = build(name, dtype=torch.float32), tokens(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = watch(memory, x)
    assert weights.shape == (20, SLOTS)
    assert (out - plain_output(memory, x)).abs().max(-1).values.median() < 0.05


@every_memory
def test_weights_are_observed_before_dropout(name):
    memory, x = build(name, dropout=0.5), tokens(8)
    out, weights = watch(memory.train(), x)
    torch.testing.assert_close(weights, plain_weights(memory, x))
    assert not torch.allclose(out, plain_output(memory, x))
    torch.testing.assert_close(memory.eval()(x), plain_output(memory, x))


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "softmax-ln"])  # whose norm hides the scale
def test_dropout_keeps_the_mean(name):
    memory, x = build(name, dropout=0.5, bias=False), tokens(8)
    with torch.no_grad():
        mean, exact = memory.train()(x.expand(10000, 8, WIDTH)).mean(0), plain_output(memory, x)
    torch.testing.assert_close(mean, exact, atol=0.05 * exact.abs().max().item(), rtol=0)


def test_dropout_half_gives_zero_or_twice():
    memory = build("relu", dropout=0.5, bias=False, slots=1)
    with torch.no_grad():
        memory.lookup.keys.abs_()
    x = tokens(200).abs()
    ratio = memory.train()(x) / plain_output(memory, x)
    assert sorted(ratio.round(decimals=9).abs().unique().tolist()) == [0.0, 2.0]


@every_memory
def test_observation_is_lazy_and_harmless(name):
    memory, x = build(name, dropout=0.3).train(), tokens(4)
    runs = {}
    for kind, observer in {"none": None, "idle": lambda _: None, "asking": lambda seen: seen.weights()}.items():
        memory.observer = observer
        torch.manual_seed(1)
        with Recorder() as recorder:
            out = memory(x)
        runs[kind] = out, recorder.calls
    assert runs["idle"][1] == runs["none"][1]
    for kind in ("idle", "asking"):
        assert torch.equal(runs[kind][0], runs["none"][0])


@every_memory
def test_values_are_all_that_is_mixed(name):
    memory, x = build(name, bias=False), tokens(5)
    if name == "softmax-ln":
        memory.norm = nn.Identity()
    out, weights = watch(memory, x)
    assert memory.values.shape == (SLOTS, WIDTH)
    torch.testing.assert_close(out, weights @ memory.values)


@pytest.mark.parametrize("name", [*DENSE, *PRODUCT])
def test_initial_matrices_are_uniform_up_to_the_limit(name):
    memory = KeyValueMemory(64, 1024, name)
    key_fans = (32, 32) if name in PRODUCT else (64, 1024)
    for matrix, fans in ((memory.lookup.keys, key_fans), (memory.values, (64, 1024))):
        limit = math.sqrt(3 / (sum(fans) / 2))
        assert 0.995 * limit < matrix.abs().max() <= limit
        assert matrix.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)
    assert memory.lookup.key_bias.count_nonzero() == 0
    assert memory.value_bias.count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "slots", "keep", "experts"),
    [
        ("topk", 2048, 32, None),
        ("topk", 20, 20, None),
        ("product-relu", 4096, 32, None),
        ("product-softmax", 4, 4, None),
        ("sigma-moe", 2048, 4, 16),
        ("sigma-moe", 64, 1, 4),
        ("sigma-moe", 7, 1, 1),
    ],
)
def test_defaults(name, slots, keep, experts):
    lookup = KeyValueMemory(WIDTH, slots, name).lookup
    assert lookup.keep == keep
    assert getattr(lookup, "experts", None) == experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "rela"}, "unknown memory 'rela'; did you mean 'relu' or 'relu2'?"),
        ({"slots": 0}, "slots = 0 is below 1; use 1 or more"),
        ({"width": 0}, "width = 0 is below 1; use 1 or more"),
        ({"layers": 0}, "layers = 0 is below 1; use 1 or more"),
        ({"dropout": 1.0}, "dropout = 1.0 is outside [0, 1); use 0 for none"),
        ({"dropout": -0.1}, "dropout = -0.1 is outside [0, 1); use 0 for none"),
        ({"dropout": math.nan}, "dropout = nan is outside [0, 1); use 0 for none"),
        (
            {"memory": "sigma-moe", "expert_dropout": 1.5},
            "expert_dropout = 1.5 is outside [0, 1); use 0 for none",
        ),
        ({"memory": "topk", "keep": 0}, "keep = 0 is outside 1 to 16, the number of slots"),
        ({"memory": "topk", "keep": 17}, "keep = 17 is outside 1 to 16, the number of slots"),
        ({"memory": "product-relu", "keep": 17}, "keep = 17 is outside 1 to 16, the number of slots"),
        ({"memory": "sigma-moe", "experts": 4, "keep": 5}, "keep = 5 is outside 1 to 4, the number of experts"),
        (
            {"memory": "product-relu", "slots": 20},
            "slots = 20 is no square, as 'product-relu' needs; use 16 or 25",
        ),
        (
            {"memory": "product-softmax", "width": 7},
            "width = 7 is odd, but 'product-softmax' halves it; use 6 or 8",
        ),
        ({"memory": "product-softmax", "width": 1}, "width = 1 is odd, but 'product-softmax' halves it; use 2"),
        ({"memory": "sigma-moe", "slots": 64, "experts": 5}, "experts = 5 does not divide slots = 64; use 4 or 8"),
        ({"memory": "sigma-moe", "slots": 64, "experts": 0}, "experts = 0 does not divide slots = 64; use 1"),
        ({"memory": "sigma-moe", "slots": 1, "experts": 3}, "experts = 3 does not divide slots = 1; use 1"),
        (
            {"memory": "relu", "keep": 0},
            "keep = 0 means nothing to memory 'relu'; it is for topk, product-softmax, product-relu, sigma-moe",
        ),
        ({"memory": "topk", "experts": 4}, "experts = 4 means nothing to memory 'topk'; it is for sigma-moe"),
        (
            {"memory": "relu", "expert_dropout": 0.1},
            "expert_dropout = 0.1 means nothing to memory 'relu'; it is for sigma-moe",
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refusals_name_the_values_and_what_would_do(arguments, message):
    with pytest.raises(ConfigError) as refusal:
        KeyValueMemory(**{"width": WIDTH, "slots": SLOTS} | arguments)
    assert str(refusal.value) == message


@pytest.mark.parametrize("shape", [(), (3, 4), (WIDTH, 1)], ids=str)
def test_input_of_another_width_is_refused(shape):
    with pytest.raises(ShapeError) as refusal:
        KeyValueMemory(WIDTH, SLOTS)(torch.zeros(shape))
    assert str(refusal.value) == f"x is {list(shape)}, but the memory needs [..., E] with E = 8"


# Seconds for one layer, for it compiles. `aot_eager` traces both passes as the default backend does, but builds no C++.
@pytest.mark.parametrize("name", DENSE)
def test_dense_rows_compile_as_one_graph(name):
    torch._dynamo.reset()
    memory, x = build(name), tokens(3).requires_grad_()
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), memory(x))
    (grad,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (eager_grad,) = torch.autograd.grad(memory(x).square().sum(), x)
    torch.testing.assert_close(grad, eager_grad)
