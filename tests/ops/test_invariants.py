"""What holds for every row of the table, whatever its formula."""

import pytest
import torch
from closeness import OPTIONS, peak_allocation
from hypothesis import given, settings
from hypothesis import strategies as st

from rectiformer import VARIANTS, attention, attention_stats, attention_weights
from rectiformer.ops.call import count_true

RECTIFIED = [name for name, variant in VARIANTS.items() if variant.rectified]
WEIGHTED = [name for name, variant in VARIANTS.items() if variant.has_weights]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def inputs(B=2, H=2, M=6, N=9, D=8, dtype=torch.float32):
    return [torch.randn(B, H, length, D).to(dtype).requires_grad_() for length in (M, N, N)]


def gradients(out, leaves):
    return torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)


def close(a, b):
    """Equal but for the order of float32 sums over a dozen terms."""
    return (a - b).abs().max() <= 32 * torch.finfo(a.dtype).eps * max(1, b.abs().max().item())


@each_variant
@pytest.mark.parametrize("junk", [0.0, 1e4, float("nan"), float("inf")], ids=str)
def test_padding_never_leaks(variant, junk):
    q, k, v = inputs()
    alone = attention(q, k, v, variant)
    filler = torch.full((2, 2, 5, 8), junk)
    k_padded, v_padded = torch.cat([k, filler], 2), torch.cat([v, filler], 2)
    padded = attention(q, k_padded, v_padded, variant, key_lengths=[9, 9])
    assert close(padded, alone)
    for ours, expected in zip(gradients(padded, (q, k, v)), gradients(alone, (q, k, v)), strict=True):
        assert ours.isfinite().all()
        assert (ours - expected).abs().max() <= 1e-4 * max(1, expected.abs().max().item())


@each_variant
def test_who_shares_the_batch_does_not_matter(variant):
    q, k, v = inputs(B=3)
    lengths = torch.tensor([9, 4, 0])
    together = attention(q, k, v, variant, key_lengths=lengths)
    for b in range(3):
        alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], variant, key_lengths=lengths[b : b + 1])
        assert close(together[b : b + 1], alone)


@each_variant
@pytest.mark.parametrize("low", [-5e3, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf], ids=str)
def test_a_low_bias_hides_as_a_mask_does(variant, low):
    """Keys it hides weigh exactly 0 and do not count in n; the first row sees nothing at all."""
    q, k, v = inputs(H=1)
    shown = torch.ones(6, 9, dtype=torch.bool).tril(-1)
    usual = torch.randn(6, 9)
    bias = torch.where(shown, usual, low).requires_grad_()
    found = attention(q, k, v, variant, attn_bias=bias)
    expected = attention(q, k, v, variant, attn_bias=usual, attn_mask=shown)
    assert torch.equal(found, expected)
    *ours, d_bias = gradients(found, (q, k, v, bias))
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(expected, (q, k, v)), strict=True))
    assert not d_bias[~shown].any()
    if VARIANTS[variant].has_weights:
        assert not attention_weights(q, k, variant, attn_bias=bias)[..., ~shown].any()
        assert torch.equal(attention_stats(q, k, variant, attn_bias=bias).visible[0, 0], shown.sum(-1))


def test_a_bias_above_the_limit_is_a_bias():
    q, k, v = inputs()
    bias = torch.full((6, 9), -4999.0)
    assert (attention(q, k, v, "identity", attn_bias=bias, scale=0.0).abs() > 1).any()


@each_variant
def test_causal_rows_ignore_the_future(variant):
    q, k, v = inputs(M=9)
    before = attention(q, k, v, variant, causal=True, **OPTIONS.get(variant, {}))
    changed_k, changed_v = k.detach().clone(), v.detach().clone()
    changed_k[:, :, 5:], changed_v[:, :, 5:] = torch.randn(2, 2, 4, 8) * 50, torch.randn(2, 2, 4, 8) * 50
    after = attention(q, changed_k, changed_v, variant, causal=True, **OPTIONS.get(variant, {}))
    assert torch.equal(after[:, :, :5], before[:, :, :5])
    assert not torch.equal(after[:, :, 5:], before[:, :, 5:])


@each_variant
def test_keys_and_values_permuted_together_change_nothing(variant):
    q, k, v = inputs()
    order = torch.randperm(9)
    assert close(attention(q, k[:, :, order], v[:, :, order], variant), attention(q, k, v, variant))


@each_variant
def test_one_query_at_a_time_equals_all_at_once(variant):
    q, k, v = inputs(M=9)
    whole = attention(q, k, v, variant, causal=True)
    for m in range(9):
        step = attention(q[:, :, m : m + 1], k[:, :, : m + 1], v[:, :, : m + 1], variant, causal=True)
        assert close(step, whole[:, :, m : m + 1])


@each_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(variant, dtype):
    q, k, v = inputs(dtype=dtype)
    mask = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    bias = torch.zeros(6, 9, dtype=dtype, requires_grad=True)
    out = attention(q, k, v, variant, attn_mask=mask, attn_bias=bias)
    assert out.dtype == dtype
    assert (out[0, :, 2] == 0).all()
    assert (out[1] == 0).all()
    for grad in gradients(out.float(), (q, k, v, bias)):
        assert grad.isfinite().all()
        assert (grad[1] == 0).all() or grad.dim() == 2


@pytest.mark.parametrize("variant", WEIGHTED)
@pytest.mark.parametrize("lift", [1e4, 3e38], ids=["large", "largest"])
def test_a_bias_cannot_lift_a_hidden_key(variant, lift):
    q, k, _ = inputs(M=9)
    hidden = torch.rand(9, 9) > 0.6
    bias = torch.where(hidden, lift, 0.0)
    weights = attention_weights(q, k, variant, attn_mask=~hidden, attn_bias=bias, causal=True)
    assert (weights[:, :, hidden] == 0).all()
    assert weights.isfinite().all()
    weights = attention_weights(
        q, k, variant, key_lengths=[4, 4], attn_bias=torch.full((9,), lift).where(torch.arange(9) > 3, 0)
    )
    assert (weights[..., 4:] == 0).all()


@pytest.mark.parametrize("variant", RECTIFIED)
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_all_negative_scores_attend_to_exactly_nothing(variant, backend):
    q, k, v = inputs()
    out = attention(q.abs() + 0.1, -k.abs() - 0.1, v, variant, backend=backend)
    assert (out == 0).all()
    for grad in gradients(out, (q, k, v)):
        assert (grad == 0).all()
    assert attention_stats(q.abs() + 0.1, -k.abs() - 0.1, variant).null.all()


@pytest.mark.parametrize("variant", WEIGHTED)
def test_n_is_the_number_of_visible_keys(variant):
    """Doubling the keys by hidden copies leaves every weight as it was, causal or not."""
    q, k, _ = inputs(M=9)
    for causal in (False, True):
        alone = attention_weights(q, k, variant, causal=causal)
        mask = torch.cat([torch.ones(9, 9), torch.zeros(9, 9)], 1).bool()
        if causal:
            mask[:, :9] = mask[:, :9].tril()
        assert close(attention_weights(q, torch.cat([k, k], 2), variant, attn_mask=mask)[..., :9], alone)


@pytest.mark.parametrize("keys", [0, 5, 128, 300])
def test_counting_the_keys_of_a_mask_takes_no_more_than_the_mask(keys):
    rows = (2, 3, 64)
    for mask in (torch.rand(*rows, keys) > 0.2, torch.ones(*rows, 1, dtype=torch.bool).expand(*rows, keys)):
        found = []
        peak = peak_allocation(lambda: found.append(count_true(mask)))  # noqa: B023
        assert torch.equal(found[0], mask.sum(-1))
        assert peak <= mask.numel() + 4 * found[0].nbytes


def test_a_mask_of_any_length_is_exported():
    class Masked(torch.nn.Module):
        def forward(self, q, k, mask):
            return attention(q, k, k, "reluformer", attn_mask=mask, backend="reference")

    keys = torch.export.Dim("keys", min=2, max=4096)
    given = [(torch.randn(1, 2, 7, 8), torch.randn(1, 2, n, 8), torch.rand(1, 1, 7, n) > 0.5) for n in (9, 300)]
    exported = torch.export.export(Masked(), given[0], dynamic_shapes=(None, {2: keys}, {3: keys})).module()
    assert torch.equal(exported(*given[1]), Masked()(*given[1]))


@settings(max_examples=60)
@given(
    variant=st.sampled_from(list(VARIANTS)),
    M=st.sampled_from([1, 2, 3, 7, 17, 31, 64]),
    N=st.one_of(st.integers(0, 40), st.sampled_from([61, 127, 128, 211, 300])),
    D=st.sampled_from([16, 40, 64, 80, 111, 256]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 3)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    hide=st.sampled_from(["none", "some", "rows", "all"]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(0, 9)),
    seed=st.integers(0, 99),
)
def test_any_shape_gives_finite_rows_and_zeros_where_nothing_is_seen(
    variant, M, N, D, heads, dtype, hide, causal, window, seed
):
    if variant == "inhibitor":
        M, D = min(M, 7), min(D, 16)
    torch.manual_seed(seed)
    H, K = heads
    q = torch.randn(2, H, M, D).to(dtype).requires_grad_()
    k, v = (torch.randn(2, K, N, size).to(dtype).requires_grad_() for size in (D, 5))
    mask = {
        "none": torch.ones(2, 1, M, N),
        "some": torch.rand(2, 1, M, N) > 0.5,
        "rows": (torch.rand(2, 1, M, 1) > 0.5).expand(2, 1, M, N),
        "all": torch.zeros(2, 1, M, N),
    }[hide].bool()
    out = attention(q, k, v, variant, attn_mask=mask, causal=causal, window_size=window)
    assert out.shape == (2, H, M, 5)
    assert out.dtype == dtype
    assert out.isfinite().all()
    position = torch.arange(M)[:, None] + N - M
    near = torch.ones(M, N, dtype=torch.bool) if window is None else (torch.arange(N) - position).abs() <= window
    near &= (torch.arange(N) <= position) | (not causal)
    blind = ~(mask & near).any(-1).expand(2, H, M)
    assert (out[blind] == 0).all()
    for grad in torch.autograd.grad(out.float().sum(), (q, k, v), allow_unused=True):
        assert grad is None or grad.isfinite().all()
