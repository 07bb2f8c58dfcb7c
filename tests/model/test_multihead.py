"""MultiheadAttention vs. torch.nn.MultiheadAttention: number for number with a softmax, shape for shape without."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rectiformer import VARIANTS
from rectiformer.errors import RectiformerError
from rectiformer.model.multihead import MultiheadAttention

WIDTH, HEADS, B, M, N = 8, 4, 3, 5, 9  # one key more than topk keeps
WEIGHED = [name for name, row in VARIANTS.items() if row.has_weights]
CASES = {
    "batch-first": {"batch_first": True},
    "length-first": {},
    "unbatched": {"batch_first": True},
    "other-widths": {"kdim": 6, "vdim": 10},
    "other-widths-no-bias": {"kdim": 6, "vdim": 10, "bias": False, "batch_first": True},
    "bias-kv": {"add_bias_kv": True},
    "zero-attn": {"add_zero_attn": True},
    "bias-kv-and-zero-attn": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "no-bias": {"bias": False},
}
MASKS = {
    "no-mask": [],
    "bool": ["attn"],
    "float": ["float-attn"],
    "bool-a-head": ["attn-a-head"],
    "float-a-head": ["float-attn-a-head"],
    "padding": ["padding"],
    "float-padding": ["float-padding"],
    "bool-and-padding": ["attn", "padding"],
    "float-and-float-padding": ["float-attn-a-head", "float-padding"],
    "float-and-padding": ["float-attn", "padding"],
    "bool-and-float-padding": ["attn-a-head", "float-padding"],
}
RETURNS = {
    "averaged": {},
    "a-head": {"average_attn_weights": False},
    "no-weights": {"need_weights": False},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_mode = pytest.mark.parametrize("mode", ["training", "evaluation", "evaluation-without-gradients"])


def torch_module(dtype=torch.float64, **case):
    """Torch's own module, its biases moved away from 0 so that a test sees them."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **case)
    with torch.no_grad():
        for part in theirs.parameters():
            if part.dim() == 1:
                part.add_(torch.randn_like(part) / 4)
    return theirs


def copy_of(theirs, variant="softmax", dtype=torch.float64, **case):
    ours = MultiheadAttention(WIDTH, HEADS, dtype=dtype, variant=variant, **case)
    ours.load_state_dict(theirs.state_dict())
    return ours


def inputs(batched=True, dtype=torch.float64, **case):
    """Query, key and value, each with a gradient, in the layout that a case asks for."""
    widths, lengths = (WIDTH, case.get("kdim", WIDTH), case.get("vdim", WIDTH)), (M, N, N)
    found = [torch.randn(B, n, width, dtype=dtype) for n, width in zip(lengths, widths, strict=True)]
    if not batched:
        found = [tensor[0] for tensor in found]
    elif not case.get("batch_first"):
        found = [tensor.transpose(0, 1).contiguous() for tensor in found]
    return [tensor.requires_grad_() for tensor in found]


def masks(names, batched=True):
    """Masks in torch's sense: True hides, numbers are added. Key 0 stays visible, for torch answers NaN without any."""
    call = {}
    for name in names:
        sequences = B if batched else 1
        if "padding" in name:
            hidden = torch.arange(N) >= torch.tensor([N, 2, 4])[:sequences, None]
            hidden[0, 3] = True  # torch takes any key for padding, not only the last ones
            hidden = hidden if batched else hidden[0]
        else:
            hidden = torch.rand(*((sequences * HEADS,) if "a-head" in name else ()), M, N) > 0.6
        hidden[..., 0] = False
        mask = hidden
        if "float" in name:
            mask = torch.randn(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
        call["key_padding_mask" if "padding" in name else "attn_mask"] = mask
    return call


def results(module, tensors, **call):
    """The output, the weights where there are any, and the gradients of all inputs and parameters."""
    found = {"out": (got := module(*tensors, **call))[0]}
    if got[1] is not None:
        found["weights"] = got[1]
    for name, tensor in found.items():  # a fixed upstream gradient, the same for both modules
        torch.manual_seed(len(name))
        tensor.backward(torch.randn(tensor.shape, dtype=tensor.dtype), retain_graph=True)
    found |= {f"d_{name}": tensor.grad.clone() for name, tensor in zip("qkv", tensors, strict=True)}
    found |= {f"d_{name}": part.grad.clone() for name, part in module.named_parameters()}
    module.zero_grad()
    for tensor in tensors:
        tensor.grad = None
    return found


def assert_same(actual, expected):
    """Equal but for the order of sums: a thousand roundings of the largest entry. No sum here has over 50 terms."""
    roundings = 1000 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=roundings)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")  # torch's, for its own code
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES)
def test_softmax_equals_torch(case, mask, returns):
    arguments, batched = CASES[case], case != "unbatched"
    theirs = torch_module(**arguments)
    ours = copy_of(theirs, **arguments)
    call = masks(MASKS[mask], batched) | RETURNS[returns]
    tensors = inputs(batched, **arguments)
    found, expected = results(ours, tensors, **call), results(theirs, tensors, **call)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same(found[name], expected[name])


def test_float_mask_receives_torch_gradients():
    theirs = torch_module()
    mask, tensors = torch.randn(B * HEADS, M, N, dtype=torch.float64).requires_grad_(), inputs()
    out, expected = (module(*tensors, attn_mask=mask)[0] for module in (copy_of(theirs), theirs))
    probe = torch.randn_like(out)
    assert_same(*(torch.autograd.grad(result, mask, probe)[0] for result in (out, expected)))


@pytest.mark.parametrize("low", [-1e4, -1e9, -torch.inf])
@every_variant
def test_low_numbers_in_a_mask_hide_the_future(variant, low):
    module, x = MultiheadAttention(16, 4, variant=variant, batch_first=True), torch.randn(2, 5, 16)
    future, padding = torch.ones(5, 5, dtype=torch.bool).triu(1), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    outcomes = []
    for hide in (lambda mask: mask, lambda mask: torch.where(mask, low, 0.0)):
        given = {"attn_mask": hide(future), "key_padding_mask": hide(padding)}
        outcomes.append(module(x, x, x, need_weights=VARIANTS[variant].has_weights, **given))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    if outcomes[0][1] is not None:
        assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("case", CASES)
@every_variant
def test_shapes_are_those_of_torch(variant, case, returns):
    arguments, batched, call = CASES[case], case != "unbatched", RETURNS[returns]
    tensors = inputs(batched, **arguments)
    expected, expected_weights = torch_module(**arguments)(*tensors, **call)
    ours = MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, variant=variant, **arguments)
    if variant not in WEIGHED and call.get("need_weights", True):
        with pytest.raises(RectiformerError, match="has no weights to look at"):
            ours(*tensors, **call)
        return
    out, weights = ours(*tensors, **call)
    assert out.shape == expected.shape
    assert (weights is None) == (expected_weights is None)
    assert weights is None or weights.shape == expected_weights.shape


@pytest.mark.parametrize("variant", WEIGHED)
def test_weights_are_those_that_mixed_the_values(variant):
    ours = MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, variant=variant, batch_first=True)
    tensors = inputs(batch_first=True)
    call = masks(["float-attn-a-head", "padding"])
    out, weights = ours(*tensors, average_attn_weights=False, **call)
    values = tensors[2] @ ours.in_proj_weight[2 * WIDTH :].T + ours.in_proj_bias[2 * WIDTH :]
    mixed = weights @ values.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_same(out, ours.out_proj(ours.norm(mixed.transpose(1, 2).flatten(2))))
    assert_same(ours(*tensors, **call)[1], weights.mean(1))
    hidden = (call["attn_mask"] == -math.inf).view(B, HEADS, M, N) | call["key_padding_mask"][:, None, None]
    assert (weights[hidden] == 0).all()


def test_weights_are_returned_before_dropout():
    ours = MultiheadAttention(WIDTH, HEADS, dropout=0.5, dtype=torch.float64)
    tensors = inputs()
    (out, weights), (calm, expected) = ours.train()(*tensors), ours.eval()(*tensors)
    assert torch.equal(weights, expected)
    assert not torch.allclose(out, calm)


@every_variant
def test_a_state_dict_of_torch_loads(variant):
    theirs, ours = torch_module(), MultiheadAttention(WIDTH, HEADS, variant=variant, dtype=torch.float64)
    state = theirs.state_dict()
    before = {name: part.clone() for name, part in ours.state_dict().items()}
    assert str(ours.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    assert state.keys() == theirs.state_dict().keys()  # the caller's dict is left alone
    for name, part in ours.state_dict().items():
        assert torch.equal(part, state.get(name, before[name]))
    assert before.keys() >= state.keys()


@every_variant
def test_a_state_dict_of_its_own_round_trips(variant):
    ours, twin = (MultiheadAttention(WIDTH, HEADS, variant=variant, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for part in ours.parameters():
            part.add_(torch.randn_like(part) / 4)
    twin.load_state_dict(ours.state_dict())
    tensors = inputs()
    assert torch.equal(twin(*tensors, need_weights=False)[0], ours(*tensors, need_weights=False)[0])


@every_variant
def test_what_is_missing_is_reported(variant):
    block = nn.ModuleDict({"attend": MultiheadAttention(WIDTH, HEADS, variant=variant)})
    own = [name for name in block.state_dict() if name.startswith(("attend.norm.", "attend.learned."))]
    for missing in block.state_dict():
        if own == [missing]:  # without it, the dict is torch's
            continue
        state = {name: part for name, part in block.state_dict().items() if name != missing}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            block.load_state_dict(state)


@pytest.mark.parametrize("case", ["batch-first", "length-first"])
@every_variant
def test_a_fully_masked_query_gives_zeros_where_torch_gives_nan(variant, case):
    arguments = CASES[case]
    theirs, tensors = torch_module(**arguments), inputs(**arguments)
    ours, has_weights = copy_of(theirs, variant, **arguments), variant in WEIGHED
    mask = torch.zeros(M, N, dtype=torch.bool)
    mask[2] = True
    expected, _ = theirs(*tensors, attn_mask=mask)
    out, weights = ours(*tensors, attn_mask=mask, need_weights=has_weights)
    row = (slice(None), 2) if case == "batch-first" else 2
    assert expected[row].isnan().all()
    assert torch.equal(out[row], ours.out_proj.bias.expand(B, WIDTH))
    assert not has_weights or (weights[:, 2] == 0).all()
    (out.sum() + (weights.sum() if has_weights else 0)).backward()
    grads = [tensor.grad for tensor in (*tensors, *ours.parameters())]
    assert all(grad.isfinite().all() for grad in grads)


def encoder_layer(variant):
    """Torch's encoder layer with the attention replaced, as a user would."""
    arguments = {"batch_first": True, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, **arguments)
    layer.self_attn = MultiheadAttention(WIDTH, HEADS, variant=variant, **arguments)
    return layer


def run(module, mode, call):
    """Evaluation without gradients is where torch's layer takes a fast path of its own, unless something stops it."""
    module.train(mode == "training")
    with torch.set_grad_enabled(mode != "evaluation-without-gradients"):
        return module(**call)


@every_mode
@pytest.mark.parametrize("mask", ["no-mask", "padding", "causal"])
@every_variant
def test_replaces_the_attention_of_an_encoder_layer(variant, mask, mode):
    layer, x = encoder_layer(variant), torch.randn(B, N, WIDTH, dtype=torch.float64)
    call = {"src": x}
    if mask == "causal":
        hidden = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
        call |= {"src_mask": hidden, "is_causal": True}
    if mask == "padding":
        call["src_key_padding_mask"] = torch.arange(N) >= torch.tensor([N, 2, 4])[:, None]
    attended, _ = layer.self_attn(x, x, x, call.get("src_key_padding_mask"), False, call.get("src_mask"))
    x = layer.norm1(x + attended)
    assert_same(run(layer, mode, call), layer.norm2(x + layer.linear2(layer.linear1(x).relu())))


@every_mode
@pytest.mark.parametrize("variant", ["softmax", "rela-g", "reluformer"])
def test_works_in_a_stack_of_encoder_layers(variant, mode):
    stack = nn.TransformerEncoder(encoder_layer(variant), 2, enable_nested_tensor=False)
    x, hidden = torch.randn(B, N, WIDTH, dtype=torch.float64), torch.arange(N) >= torch.tensor([N, 2, 4])[:, None]
    expected = x
    for layer in stack.layers:
        expected = run(layer, "training", {"src": expected, "src_key_padding_mask": hidden})
    out = run(stack, mode, {"src": x, "src_key_padding_mask": hidden})
    assert_same(out[~hidden], expected[~hidden])


@every_variant
def test_a_deep_copy_stands_alone(variant):
    ours, tensors = MultiheadAttention(WIDTH, HEADS, variant=variant, dtype=torch.float64), inputs()
    twin = copy.deepcopy(ours)
    assert isinstance(twin, nn.MultiheadAttention)
    before = ours(*tensors, need_weights=False)[0]
    assert torch.equal(twin(*tensors, need_weights=False)[0], before)
    with torch.no_grad():
        for part in twin.parameters():
            part.add_(1)
    kept = {name: part.clone() for name, part in twin.named_parameters()}
    theirs = torch_module().state_dict()
    twin.load_state_dict(theirs)  # its own norm stays, not that of the original
    for name, part in twin.named_parameters():
        assert torch.equal(part, theirs.get(name, kept[name]))
    assert torch.equal(ours(*tensors, need_weights=False)[0], before)


@every_variant
def test_state_in_bfloat16(variant):
    theirs, tensors = torch_module(torch.bfloat16), inputs(dtype=torch.bfloat16)
    ours = copy_of(theirs, variant, torch.bfloat16)
    assert {part.dtype for part in ours.state_dict().values()} == {torch.bfloat16}
    out, weights = ours(*tensors, need_weights=variant in WEIGHED)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert weights is None or weights.dtype == torch.bfloat16
    assert all(tensor.grad.isfinite().all() for tensor in (*tensors, *ours.parameters()))


def test_attention_can_be_learned_as_one_or_not_at_all():
    raw = {
        learn: MultiheadAttention(WIDTH, HEADS, variant="entmax", option_sharing=learn).learned
        for learn in ("layer", "fixed")
    }
    assert raw["layer"].raw.shape == (1,)
    assert raw["fixed"] is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"attn_mask": torch.zeros(N, M, dtype=torch.bool)},
            "attn_mask is [9, 5], but needs [M N] = [5, 9] or [B*H M N] = [12, 5, 9]",
        ),
        (
            {"attn_mask": torch.zeros(B, M, N)},
            "attn_mask is [3, 5, 9], but needs [M N] = [5, 9] or [B*H M N] = [12, 5, 9]",
        ),
        (
            {"key_padding_mask": torch.zeros(B, M, dtype=torch.bool)},
            "key_padding_mask is [3, 5], but keys are [B N] = [3, 9]",
        ),
        ({"is_causal": True}, "is_causal is a hint about attn_mask; give the mask as well, as torch requires"),
        (
            {"value": torch.zeros(N, WIDTH)},
            "query is 3-D: expected `key` and `value` to be 3-D but found 3-D and 2-D tensors respectively",
        ),
        (
            {"query": torch.zeros(M, WIDTH)},
            "query is 2-D: expected `key` and `value` to be 2-D but found 3-D and 3-D tensors respectively",
        ),
    ],
    ids=["transposed", "a-sequence", "padding-of-queries", "causal-without-mask", "2D-value", "2D-query"],
)
def test_refusals_of_a_call_name_the_shapes(call, message):
    tensors = dict(zip(("query", "key", "value"), inputs(dtype=torch.float32), strict=True))
    with pytest.raises(RectiformerError) as refusal:
        MultiheadAttention(WIDTH, HEADS)(**tensors | call)
    assert str(refusal.value) == message


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_a_mask_of_whole_numbers_is_refused_by_its_name(mask):
    call = {mask: torch.zeros(M if mask == "attn_mask" else B, N, dtype=torch.int64)}
    with pytest.raises(RectiformerError, match=mask):
        MultiheadAttention(WIDTH, HEADS)(*inputs(dtype=torch.float32), **call)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_drawn_anew_as_torch_draws_them(case):
    theirs, ours = (cls(WIDTH, HEADS, **CASES[case]) for cls in (nn.MultiheadAttention, MultiheadAttention))
    with torch.no_grad():
        for part in (*theirs.parameters(), *ours.parameters()):
            part.fill_(7)
    for module in (theirs, ours):
        torch.manual_seed(5)
        module._reset_parameters()
    for name, part in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), part)


@every_variant
def test_drawing_anew_restores_what_the_variant_adds(variant):
    ours, fresh = (MultiheadAttention(WIDTH, HEADS, variant=variant) for _ in range(2))
    with torch.no_grad():
        for part in ours.parameters():
            part.fill_(7)
    ours._reset_parameters()
    for name, part in ours.named_parameters():
        expected = fresh.get_parameter(name)
        if name.startswith(("norm.", "learned.")):
            drawn = bool((expected != expected[0]).any())  # else it starts at one number
            assert torch.equal(part, expected) or (drawn and part.abs().max() <= math.sqrt(3 / WIDTH)), name


def test_drawing_anew_keeps_the_softmax_of_torch_away():
    layer, x = encoder_layer("rela-g"), torch.randn(B, N, WIDTH, dtype=torch.float64)
    layer.self_attn._reset_parameters()
    call = {"src": x}
    assert_same(run(layer, "evaluation-without-gradients", call), run(layer, "training", call))


@pytest.mark.parametrize("part", ["in_proj_bias", "bias_k", "bias_v"])
@pytest.mark.parametrize("case", ["bias-kv", "bias-kv-and-zero-attn"])
def test_a_bias_of_half_precision_in_a_module_of_doubles(case, part):
    theirs = torch_module(**CASES[case])
    ours = copy_of(theirs, **CASES[case])
    rounded = getattr(theirs, part).detach().half()
    setattr(ours, part, nn.Parameter(rounded))
    setattr(theirs, part, nn.Parameter(rounded.double()))
    tensors = inputs(**CASES[case])
    found, expected = results(ours, tensors), results(theirs, tensors)
    assert found[f"d_{part}"].dtype == torch.float16
    del found[f"d_{part}"]
    for name in found:
        assert_same(found[name], expected[name])


def test_it_is_printed_with_its_variant():
    assert repr(MultiheadAttention(8, 2, variant="rela-g")).startswith(
        "MultiheadAttention(\n  8, num_heads=2, variant="
    )


@pytest.mark.parametrize("case", CASES)
def test_autocast_gives_what_torch_gives(case):
    theirs = torch_module(torch.float32, **CASES[case])
    ours = MultiheadAttention(WIDTH, HEADS, variant="softmax", **CASES[case])
    ours.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(B, M, width, generator=generator) for width in (WIDTH, theirs.kdim, theirs.vdim)]
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (module(*inputs) for module in (theirs, ours))
    for theirs_part, part in zip(expected, found, strict=True):
        torch.testing.assert_close(part, theirs_part, atol=2e-2, rtol=2e-2)
