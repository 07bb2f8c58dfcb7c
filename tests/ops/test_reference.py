"""The reference against formulas written out row by row, over the visible keys alone."""

import math

import entmax as entmax_package
import pytest
import torch

from rectiformer import VARIANTS, attention, attention_weights
from rectiformer.ops.simplex import entmax, entmax15, sparsemax

relu = torch.relu


def entmax_row(x, alpha):
    return entmax_package.entmax_bisect(x, alpha, dim=-1, n_iter=80)


def self_adjust_norm_row(x):
    low, high = min(x.min().item(), 0), max(x.max().item(), 0)
    return (x - low) / (high - low) * x.softmax(-1)


def top_row(x, keep):
    kept = x >= x.sort(descending=True).values[min(keep, len(x)) - 1]
    return torch.where(kept, x, -math.inf).softmax(-1)


def threshold_row(x):
    return relu(x - math.sqrt(2 * math.log(len(x)))) ** 2


def cosines(keys, query):
    """Times the root of the head size: like normal numbers where directions are random."""
    norms = [(x.square().sum(-1) + len(query) * 1e-6).sqrt() for x in (keys, query)]
    return keys @ query / (norms[0] * norms[1]) * math.sqrt(len(query))


COSINES = {"threshold": [slice(0, 6)], "threshold-diff": [slice(0, 3), slice(3, 6)]}
"""Variants whose scores are cosines, each of a part of the six dimensions."""


ROWS = {  # weights of one row of visible scores
    "softmax": lambda x: x.softmax(-1),
    "sparsemax": lambda x: entmax_package.sparsemax(x, -1),
    "entmax15": lambda x: entmax_package.entmax15(x, -1),
    "entmax": lambda x: entmax_row(x, 1.5),
    "rela": relu,
    "rela-i": relu,
    "rela-g": relu,
    "reluformer": lambda x: relu(x) / math.sqrt(len(x) / 2),
    "relu-seqlen": lambda x: relu(x) / len(x),
    "relu2": lambda x: relu(x) ** 2 / len(x),
    "relu-exp": lambda x: relu(1 + x / 2) ** 2 / len(x),
    "threshold": threshold_row,
    "threshold-diff": lambda x, y: threshold_row(x) - threshold_row(y) / 2,
    "sigmoid": lambda x: torch.sigmoid(x - math.log(len(x))),
    "softmax1": lambda x: x.exp() / (1 + x.exp().sum()),
    "self-adjust": lambda x: x * x.softmax(-1),
    "self-adjust-norm": self_adjust_norm_row,
    "softpick": lambda x: relu(x.exp() - 1) / (x.exp() - 1).abs().sum(),
    "cog": lambda x: x.sign() * x.abs().softmax(-1),
    "polynomial": lambda x: x**3 / math.sqrt(len(x)),
    "topk": lambda x: top_row(x, 8),
    "identity": lambda x: x,
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "leaky-relu": lambda x: torch.maximum(x, x / 100),
}


def visible_keys(m, M, N, b, causal=False, window_size=None, key_lengths=None, attn_mask=None):
    """Indices of the keys query m of sequence b sees, from the words of the documentation."""
    position = m + N - M
    left, right = (N + M, N + M) if window_size is None else window_size
    keys = [n for n in range(N) if position - left <= n <= position + right]
    keys = [n for n in keys if not causal or n <= position]
    keys = [n for n in keys if key_lengths is None or n < key_lengths[b]]
    return [n for n in keys if attn_mask is None or attn_mask[b, m, n]]


def by_rows(q, k, v, variant, scale, attn_bias=None, **visibility):
    """Attention one (sequence, head, query) at a time."""
    B, H, M, _ = q.shape
    N, group = k.shape[2], H // k.shape[1]
    out = torch.zeros(B, H, M, v.shape[3], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for m in range(M):
                seen = visible_keys(m, M, N, b, **visibility)
                if not seen:
                    continue
                keys, values = k[b, h // group, seen], v[b, h // group, seen]
                add = 0 if attn_bias is None else attn_bias[b, h, m, seen]
                if variant == "inhibitor":
                    inhibition = relu((keys - q[b, h, m]).abs().sum(-1) * scale - add)
                    out[b, h, m] = relu(values - inhibition[:, None]).sum(0)
                else:
                    query = q[b, h, m]
                    scores = [keys @ query * scale]
                    if variant in COSINES:
                        scores = [cosines(keys[:, view], query[view]) for view in COSINES[variant]]
                    out[b, h, m] = ROWS[variant](*(x + add for x in scores)) @ values
    return out


def random_inputs(B=2, H=4, K=2, M=5, N=7, D=6, Dv=3):
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, K, N, D), torch.randn(B, K, N, Dv)
    return q.double(), k.double(), v.double()


def random_mask(B=2, M=5, N=7):
    mask = torch.rand(B, M, N) > 0.4
    mask[0, 1] = False  # a query that sees nothing
    return mask


CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 2)},
    "causal window": {"causal": True, "window_size": (2, 2)},
    "lengths": {"key_lengths": [3, 0]},
    "mask": {"attn_mask": random_mask()},
    "bias": {"attn_bias": torch.randn(2, 4, 5, 7).double() + 1},
    "all": {
        "causal": True,
        "window_size": (3, 3),
        "key_lengths": [6, 4],
        "attn_mask": random_mask(),
        "attn_bias": torch.randn(2, 4, 5, 7).double() * 20,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_its_formula_over_visible_keys(variant, case):
    q, k, v = random_inputs()
    arguments = dict(CASES[case])
    expected = by_rows(q, k, v, variant, scale=6**-0.5, **arguments)
    if "attn_mask" in arguments:
        arguments["attn_mask"] = arguments["attn_mask"][:, None]
    result = attention(q, k, v, variant, backend="reference", **arguments)
    # float64 sums of seven terms and, for entmax, 80 halvings: a thousand roundings bound both
    limit = 1000 * torch.finfo(torch.float64).eps * max(1, expected.abs().max().item())
    assert (result - expected).abs().max() <= limit


def test_more_queries_than_keys_leave_the_first_without_any():
    q, k, v = random_inputs(M=7, N=3)
    out = attention(q, k, v, "softmax", causal=True)
    assert (out[:, :, :4] == 0).all()
    assert (out[:, :, 4:] != 0).any(-1).all()


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("softmax", [0.0486, 0.3592, 0.5922]),
        ("sparsemax", [0.0, 0.25, 0.75]),
        ("entmax15", [0.0, 0.3260, 0.6740]),
        ("entmax", [0.0, 0.3260, 0.6740]),
    ],
)
def test_the_published_vector(variant, expected):
    weights = attention_weights(torch.ones(1, 1, 1, 1), torch.tensor([-2, 0, 0.5]).view(1, 1, 3, 1), variant, scale=1.0)
    assert weights.flatten().tolist() == pytest.approx(expected, abs=5e-5)  # four printed digits


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    ("variant", "peer"),
    [
        ("sparsemax", lambda x: entmax_package.sparsemax(x, -1)),
        ("entmax15", lambda x: entmax_package.entmax15(x, -1)),
        ("entmax", lambda x: entmax_package.entmax_bisect(x, 1.5, -1)),
    ],
)
def test_simplex_maps_equal_the_entmax_package(variant, peer, spread):
    scores = torch.randn(1, 1, 300, 111) * spread
    weights = attention_weights(scores, torch.eye(111)[None, None], variant, scale=1.0)
    assert (weights - peer(scores)).abs().max() <= 1e-6
    assert (weights.sum(-1) - 1).abs().max() <= 1e-6


def test_alpha_is_as_precise_as_the_scores():
    scores, keys = torch.randn(1, 2, 5, 9).double(), torch.eye(9).double().expand(1, 2, 9, 9)
    alphas = 1.3, torch.tensor(1.3, dtype=torch.float64)
    number, tensor = (attention_weights(scores, keys, "entmax", scale=1.0, alpha=alpha) for alpha in alphas)
    assert torch.equal(number, tensor)


@pytest.mark.parametrize("simplex", [sparsemax, entmax15, lambda x, seen: entmax(x, seen, torch.tensor(1.3))])
def test_scores_of_minus_infinity_are_as_good_as_hidden(simplex):
    shown = torch.rand(20, 7) > 0.4
    shown[:, 0] = True
    scores, upstream = torch.randn(20, 7, requires_grad=True), torch.randn(20, 7)
    outcomes = []
    for x, visible in ((torch.where(shown, scores, -torch.inf), None), (scores, shown)):
        weights = simplex(x, visible)
        outcomes.append([weights, *torch.autograd.grad(weights, scores, upstream)])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0])
def test_entmax_follows_alpha_and_its_gradient(alpha):
    scores = torch.randn(1, 2, 20, 33, dtype=torch.float64)
    ours = torch.full((2,), alpha, dtype=torch.float64, requires_grad=True)
    theirs = torch.full((1, 2, 20, 1), alpha, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(1, 2, 20, 33, dtype=torch.float64)
    weights = attention_weights(scores, torch.eye(33).double().expand(1, 2, 33, 33), "entmax", scale=1.0, alpha=ours)
    expected = entmax_package.entmax_bisect(scores, theirs, -1, n_iter=60)
    assert (weights - expected).abs().max() <= 1e-6
    (d_ours,) = torch.autograd.grad(weights, ours, upstream)
    (d_theirs,) = torch.autograd.grad(expected, theirs, upstream)
    assert (d_ours - d_theirs.sum((0, 2, 3))).abs().max() <= 1e-6 * d_theirs.abs().sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_leaves_the_definition_in_float32(variant):
    q, k, v = (torch.randn(2, 2, 7, 16).bfloat16() for _ in range(3))
    expected = attention(q, k, v, variant, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, k, v, variant, backend="reference"), expected)


def test_options_change_the_weights_as_their_formulas_say():
    q, k, _ = random_inputs(K=4)
    base = attention_weights(q, k, "rela")
    gamma = torch.tensor([0.5, 1.0, 2.0, 4.0]).double()
    scaled = attention_weights(q, k, "reluformer", gamma=gamma)
    assert torch.allclose(scaled, base / (gamma[:, None, None] * math.sqrt(3.5)), rtol=1e-12)
    assert torch.allclose(attention_weights(q, k, "relu-seqlen", exponent=0.5), base / math.sqrt(7), rtol=1e-12)
    assert torch.equal(attention_weights(q, k, "relu2", exponent=0.0), base.square())
    x = q @ k.mT * 6**-0.5
    assert torch.allclose(attention_weights(q, k, "polynomial", degree=2), x**2 / math.sqrt(7), rtol=1e-12)
    assert ((attention_weights(q, k, "topk", keep=3) != 0).sum(-1) == 3).all()
