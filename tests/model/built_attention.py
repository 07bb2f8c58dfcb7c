"""Attention modules to test, and what is looked at in them."""

import torch

from rectiformer import RectifiedAttention

WIDTH, HEADS, HEAD = 16, 4, 4


def build(variant, *, dtype=torch.float64, **arguments):
    """A module whose biases, norms and learned numbers have left their initial values, so that a test sees them."""
    if variant == "topk":
        arguments.setdefault("options", {"keep": 3})
    if variant in ("threshold", "threshold-diff"):
        arguments.setdefault("option_init", 0.25)  # cosines of so few numbers and keys stay below 1
    module = RectifiedAttention(WIDTH, HEADS, variant, **arguments)
    with torch.no_grad():
        for part in module.parameters():
            if part.dim() == 1:
                part.add_(torch.randn_like(part) / 4)
    return module.to(dtype)


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, WIDTH, dtype=dtype)


def watch(module, *inputs, **call):
    """The output of one forward pass, what the observer saw, and what entered the output projection."""
    seen, normed = [], []
    module.observer = seen.append
    with module.output.register_forward_pre_hook(lambda _, inputs: normed.append(inputs[0])):
        out = module(*inputs, **call)
    module.observer = None
    return out, seen[0], normed[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [B, H, M, D]


def assert_same(actual, expected):
    """Equal but for the order of sums: a thousand roundings of the largest entry. No sum here has over 100 terms."""
    roundings = 1000 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=roundings)


def fix_scores(module, signs):
    """Make every score of head h have the sign signs[h], whatever the input."""
    with torch.no_grad():
        module.input_weight[: 2 * WIDTH] = 0
        module.input_bias[:WIDTH] = 1
        module.input_bias[WIDTH : 2 * WIDTH] = torch.tensor(signs).repeat_interleave(HEAD)
