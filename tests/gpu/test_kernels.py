"""Every fused kernel, compiled, against float64: shapes, features and dtypes, forward and all gradients."""

import pytest
import torch
from closeness import OPTIONS, assert_matches_reference, assert_no_worse, grid, grid_inputs, outputs_and_gradients

from rectiformer import RectifiedAttention, attention, attention_varlen, explain
from rectiformer.ops import decode, plain
from rectiformer.ops.attention import check_call
from rectiformer.ops.call import AttentionCall, Visibility
from rectiformer.ops.decode import decode_attention, follow, plain_decoding
from rectiformer.ops.gpu import SIMPLEX_POWERS, row_sums_obstacle
from rectiformer.ops.norm import OutputNorm, add_norm
from rectiformer.ops.reference import reference_attention, reference_weights
from rectiformer.ops.variants import VARIANTS
from rectiformer.ops.weights import attention_with_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
# One of each kind: the ReLA variants are one computation.
KINDS = [name for name, row in VARIANTS.items() if row.pointwise is not None and name not in ("rela-i", "rela-g")]
RECTIFIED = [name for name in KINDS if VARIANTS[name].rectified]
NORMALIZED = [name for name, row in VARIANTS.items() if row.rowwise and name not in SIMPLEX_POWERS]
HALF = [torch.bfloat16, torch.float16]
M, N = 150, 333
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 50)},
    "causal window": {"causal": True, "window_size": (100, 0)},
    "lengths": {"key_lengths": [333, 37]},
    "dropout": {"causal": True, "dropout_p": 0.25, "seed": 7},
    "everything": {"causal": True, "window_size": (200, 0), "key_lengths": [300, 0], "dropout_p": 0.25, "seed": 11},
    "negative scale": {"scale": -0.5},
    "mask": {"attn_mask": grid(2, 1, M, N, seed=4) > 0},
    "bias": {"attn_bias": grid(1, 2, M, N, seed=9), "causal": True},
    "row bias": {"attn_bias": grid(1, 2, 1, N, seed=9), "key_lengths": [333, 100]},
}
SIZES = [16, 40, 59, 64, 80, 111, 128, 192, 256]


def on_device(arguments):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def check(inputs, dtype, variant, **arguments):
    moved = [tensor.cuda() for tensor in inputs]
    assert_matches_reference(moved, dtype, "fused", variant, **on_device(arguments))


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New memory holds NaN, so that a cell which is never written is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("size", SIZES)
def test_long_kernels_at_every_head_size(size, features):
    """Variants and dtypes take turns: each combination is compiled, which takes most of the time."""
    turn = SIZES.index(size) + list(FEATURES).index(features)
    variant, dtype = KINDS[turn % len(KINDS)], HALF[turn // len(KINDS) % 2]
    check(grid_inputs(2, 2, 2, M, N, size, size), dtype, variant, **FEATURES[features])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", KINDS)
def test_long_kernels_of_every_variant(variant, features):
    check(grid_inputs(2, 2, 2, M, N, 64, 32), torch.bfloat16, variant, **FEATURES[features])


@pytest.mark.parametrize("features", FEATURES)
def test_long_kernels_in_float32(features):
    check(grid_inputs(2, 2, 2, M, N, 40, 24), torch.float32, "reluformer", **FEATURES[features])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [(1, 300), (300, 1), (97, 129), (113, 203), (257, 256), (512, 512), (1023, 1024), (1025, 1025)]
)
@pytest.mark.parametrize("size", [64, 128])
def test_long_kernels_at_every_length(size, lengths, causal):
    check(grid_inputs(1, 2, 2, *lengths, size, size), torch.bfloat16, "rela", causal=causal)


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(("heads", "key_heads", "dtype"), [(4, 2, torch.bfloat16), (6, 1, torch.float16)])
def test_grouped_heads(heads, key_heads, dtype, variant):
    check(grid_inputs(2, heads, key_heads, M, N, 64, 64), dtype, variant, causal=True)
    check(grid_inputs(2, heads, key_heads, 33, 40, 64, 64), dtype, variant, causal=True)


def dense_rows(q, k, v, call, dtype):
    """Output, mass and entropy from all weights at once."""
    weights = reference_weights(q, k, call, precision=dtype)
    mass = weights.sum(-1)
    share = weights / torch.where(mass > 0, mass, 1)[..., None]
    entropy = -(share * torch.where(share > 0, share, 1).log()).sum(-1)
    return reference_attention(q, k, v, call, precision=dtype), mass, entropy


def row_results(inputs, dtype, fused, variant, causal, key_lengths, dropout_p):
    q, k, v, upstream = (tensor.to("cuda", dtype) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    call = check_call(q, k, v, variant, causal=causal, key_lengths=key_lengths, dropout_p=dropout_p, seed=3)
    if fused:
        assert not row_sums_obstacle(q, k, v, call)
        out, rows = attention_with_rows(q, k, v, call)
        found = out, rows.mass, rows.entropy
    else:
        found = dense_rows(q, k, v, call, dtype)
    sides = [grid(*q.shape[:3], seed=seed).to(found[1]) for seed in (21, 22)]
    gradients = torch.autograd.grad(found, leaves, [upstream, *sides])
    return [found[0].detach(), *(part.detach().float() for part in found[1:]), *gradients]


def assert_rows_match(inputs, dtype, variant, causal, key_lengths=None, dropout_p=0.0):
    asked = (variant, causal, key_lengths, dropout_p)
    ours = row_results(inputs, dtype, True, *asked)
    eager = row_results(inputs, dtype, False, *asked)
    exact = [part.double() for part in row_results(inputs, torch.float64, False, *asked)]
    for name, *found in zip(["out", "mass", "entropy", "d_q", "d_k", "d_v"], ours, eager, exact, strict=True):
        assert_no_worse(f"{variant} {name}", *found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(100, 100), (257, 300), (512, 512), (1023, 1024), (2048, 2048)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_row_statistics_at_every_length(size, lengths, causal):
    assert_rows_match(grid_inputs(1, 2, 2, *lengths, size, size), torch.bfloat16, "reluformer", causal)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("variant", RECTIFIED)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_row_statistics_of_every_variant(variant, dtype, dropout_p):
    assert_rows_match(grid_inputs(2, 4, 2, M, N, 40, 40), dtype, variant, True, [333, 200], dropout_p)


@pytest.mark.parametrize("causal", [False, True])
def test_row_statistics_can_be_captured(causal):
    """Forward and backward as a CUDA graph, replayed on other inputs."""
    given = [torch.randn(2, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    lengths = torch.tensor([200, 50], device="cuda")

    def work():
        q, k, v = (tensor.detach().requires_grad_() for tensor in given)  # leaves of the stream that captures
        call = check_call(q, k, v, "reluformer", causal=causal, key_lengths=None if causal else lengths)
        out, rows = attention_with_rows(q, k, v, call)
        loss = out.float().square().mean() + rows.mass.square().mean() + rows.entropy.mean()
        return [loss, *torch.autograd.grad(loss, [q, k, v])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    for tensor in given:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for found, expected in zip(held, work(), strict=True):
        assert torch.equal(found, expected)


def test_memory_of_row_statistics_is_linear_in_the_length():
    def peak(length):
        leaves = [torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        call = check_call(*leaves, "reluformer", causal=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, rows = attention_with_rows(*leaves, call)
        (out.float().sum() + rows.mass.log().abs().sum() + rows.entropy.sum()).backward()
        return torch.cuda.max_memory_allocated() - before

    peak(2048)
    assert peak(8192) <= 4.2 * peak(2048)


SHORT_LENGTHS = [(7, 20), (32, 32), (33, 64), (100, 128)]
SHORT_FEATURES = ["full", "causal", "dropout", "negative scale"]


@pytest.mark.parametrize("lengths", SHORT_LENGTHS)
@pytest.mark.parametrize("features", SHORT_FEATURES)
@pytest.mark.parametrize("variant", ["rela", "threshold", "softmax"])
def test_short_kernels(variant, features, lengths):
    check(grid_inputs(2, 2, 2, *lengths, 64, 64), torch.bfloat16, variant, **FEATURES[features])


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("variant", [name for name in KINDS if name not in ("rela", "threshold")])
def test_short_kernels_of_every_variant(variant, turn):
    """Each feature at one length."""
    lengths, features = SHORT_LENGTHS[(turn + KINDS.index(variant)) % 4], SHORT_FEATURES[turn]
    check(grid_inputs(2, 2, 2, *lengths, 64, 64), torch.bfloat16, variant, **FEATURES[features])


@pytest.mark.parametrize("keys", [11, 29, 41, 100])
@pytest.mark.parametrize("queries", [11, 29, 41, 100])
@pytest.mark.parametrize("variant", ["rela", "reluformer", "softmax"])
def test_short_kernels_at_every_pair_of_block_sizes(variant, queries, keys):
    """16, 32, 64 and 128 on each side; the padding holds numbers that nobody may read."""
    inputs = grid_inputs(2, 2, 2, queries, keys, 64, 64)
    check(inputs, torch.bfloat16, variant, key_lengths=[keys, keys - 8])


BOUNDS = [0, 5, 5, 45, 170, 300, 300], [0, 40, 43, 43, 200, 290, 300]
SHORT_BOUNDS = [0, 5, 5, 45, 100, 228, 228], [0, 40, 43, 43, 120, 190, 228]


@pytest.mark.parametrize("sizes", [(2, 4, 2, 100, 100, 128, 64), (1, 2, 2, 150, 333, 24, 64)], ids=["short", "long"])
def test_a_difference_is_that_of_two_calls(sizes):
    """By plans, which second calls have. A half of 12 numbers begins where no load of 16 bytes can."""
    inputs = grid_inputs(*sizes)
    check(inputs, torch.bfloat16, "threshold-diff", causal=True)
    q, k, v, upstream = (tensor.to("cuda", torch.bfloat16) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    given = {"beta": 0.25, "causal": True}

    def by_views():
        views = zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        first, second = (attention(*view, v, "threshold", **given) for view in views)
        return torch.sub(first, second, alpha=0.5)

    def at_once():
        return attention(q, k, v, "threshold-diff", lam=0.5, **given)

    at_once(), by_views()
    found, expected = at_once(), by_views()
    results = [[out, *torch.autograd.grad(out, leaves, upstream)] for out in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def packed_results(dtype, backend, variant, bounds, **arguments):
    total = bounds[0][-1]
    inputs = grid_inputs(1, 2, 2, total, total, 64, 64)
    q, k, v, upstream = (tensor[0].transpose(0, 1).to("cuda", dtype) for tensor in inputs)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    on_gpu = [torch.tensor(side, device="cuda") for side in bounds]
    out = attention_varlen(*leaves, *on_gpu, variant, backend=backend, **OPTIONS.get(variant, {}), **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "features", [{}, {"causal": True}, {"window_size": (7, 3), "dropout_p": 0.25, "seed": 5}], ids=str
)
@pytest.mark.parametrize("variant", ["rela", "reluformer", "sigmoid", "threshold"])
@pytest.mark.parametrize("short", [False, True])
def test_packed_sequences(short, variant, features, dtype):
    bounds = SHORT_BOUNDS if short else BOUNDS
    most = {"max_seqlen_q": 128, "max_seqlen_k": 128} if short else {}
    ours = packed_results(dtype, "fused", variant, bounds, **features, **most)
    eager = packed_results(dtype, "reference", variant, bounds, **features)
    exact = packed_results(torch.float64, "reference", variant, bounds, **features)
    for name, *results in zip(["out", "d_q", "d_k", "d_v"], ours, eager, exact, strict=True):
        assert_no_worse(name, *results)


def decode_inputs(R, H, K, Q, capacity, D, dtype, ancestors):
    shapes = (R, H, Q, D), (R, K, capacity, D), (R, K, capacity, D), (R, K, 1, D), (R, K, 1, D)
    q, keys, values, *new = (grid(*shape, seed=seed).to("cuda", dtype) for seed, shape in enumerate(shapes))
    lengths = torch.full((1,), capacity - 3, device="cuda")
    index = None
    if ancestors:
        index = torch.randint(0, R, (R, capacity), dtype=torch.int32, device="cuda")
        index[:, capacity - 4] = torch.arange(R)  # the newest position is a row's own
    return q, keys, values, lengths, tuple(new), index


@pytest.mark.parametrize("ancestors", [False, True])
@pytest.mark.parametrize(
    "sizes", [(64, 8, 8, 1, 32, 64), (4, 8, 2, 1, 500, 128), (3, 4, 4, 4, 40, 64), (1, 8, 8, 1, 4000, 64)], ids=str
)
@pytest.mark.parametrize("variant", [*KINDS, "softmax"])
def test_decoding(variant, sizes, ancestors, monkeypatch):
    dtype = HALF[([*KINDS, "softmax"].index(variant) + ancestors) % 2]
    monkeypatch.setattr(decode, "cached_products_suit", lambda *_: False)  # no kernel of ours is eager torch
    q, keys, values, lengths, new, index = decode_inputs(*sizes, dtype, ancestors)
    row, capacity = VARIANTS[variant], keys.shape[2]
    seen = Visibility(q.shape[2], capacity, key_lengths=lengths, first=capacity - q.shape[2])

    def plain(dtype):
        held = [tensor.to(dtype, copy=True) for tensor in (keys, values)]
        call = AttentionCall(row, seen, row.resolve_options(OPTIONS.get(variant, {})), q.shape[3] ** -0.5)
        return plain_decoding(q.to(dtype), *held, call, tuple(part.to(dtype) for part in new), index)

    exact, eager = plain(torch.float64), plain(dtype)
    held = [keys.clone(), values.clone()]
    options = on_device(OPTIONS.get(variant, {}))
    ours = decode_attention(q, *held, variant, key_lengths=lengths, new_kv=new, ancestors=index, **options)
    assert_no_worse("out", ours, eager, exact)
    for cache, part in zip(held, new, strict=True):
        assert torch.equal(cache[:, :, capacity - 4], part[:, :, 0])


def test_decoding_with_its_norm():
    q, keys, values, lengths, new, index = decode_inputs(64, 8, 8, 1, 32, 64, torch.bfloat16, True)
    norm = OutputNorm(torch.ones(512, device="cuda"), torch.ones(512, device="cuda"), 1e-8)
    ours = decode_attention(
        q, keys.clone(), values.clone(), key_lengths=lengths, new_kv=new, ancestors=index, norm=norm
    )
    plain = decode_attention(q, keys.clone(), values.clone(), key_lengths=lengths, new_kv=new, ancestors=index).double()
    z = plain.transpose(1, 2).flatten(2)
    expected = z * torch.sigmoid(z) * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-8)
    error = (ours.transpose(1, 2).flatten(2).double() - expected).abs().max()
    assert error <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()  # z is rounded once more above


@pytest.mark.parametrize("variant", ["rela-g", "rela-i"])
@pytest.mark.parametrize("length", [20, 60, 128])
def test_compiled_modules_are_as_exact_as_plain_ones(variant, length):
    """bf16 results of the compiled module, next to those of the plain one, against float64."""
    torch.manual_seed(1)
    module = RectifiedAttention(128, 2, variant).cuda()
    x = torch.randn(3, length, 128, device="cuda")
    lengths = torch.tensor([length, 5, 1], device="cuda")

    def results(module, dtype, call):
        module, held = module.to(dtype), x.to(dtype).requires_grad_()
        out = call(held, key_lengths=lengths)
        return [out, *torch.autograd.grad(out.square().mean(), [held, *module.parameters()])]

    exact = results(module, torch.float64, module)
    eager = results(module, torch.bfloat16, module)
    ours = results(module, torch.bfloat16, torch.compile(module, fullgraph=True))
    for index, (fast, eager_part, true) in enumerate(zip(ours, eager, exact, strict=True)):
        # Scores off the grid may change sign by rounding, so norms are compared, not cells.
        errors = [(found.double() - true).norm().item() for found in (fast, eager_part)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps * true.norm().item(), index


@pytest.mark.parametrize("width", [500, 512])
def test_added_and_normed(width):
    x, added = (torch.randn(700, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact = torch.nn.functional.layer_norm(
        (x.double() + added.double()), (width,), weight.double(), bias.double(), 1e-6
    )
    eager = torch.nn.functional.layer_norm(x + added, (width,), weight, bias, 1e-6)
    assert_no_worse("out", add_norm(x, added, weight, bias, 1e-6), eager, exact)


@pytest.mark.parametrize(("length", "variant"), [(1000, "reluformer"), (100, "relu2")])
def test_a_hundred_reruns_are_bitwise_equal(length, variant):
    inputs = [torch.randn(2, 4, length, 64, device="cuda") for _ in range(4)]
    first = outputs_and_gradients(inputs, torch.bfloat16, "fused", variant, causal=True)
    for _ in range(100):
        again = outputs_and_gradients(inputs, torch.bfloat16, "fused", variant, causal=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_no_length_compiles_a_kernel_again():
    from rectiformer.ops.gpu.long import long_forward_kernel

    def compiled():
        return sum(len(caches[0]) for caches in long_forward_kernel.device_caches.values())

    def run(length):
        q = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
        call = check_call(q, q, q, "rela", causal=True)
        return call, outputs_and_gradients([q, q, q, q], torch.bfloat16, "fused", "rela", causal=True)

    for length in (144, 145):  # a multiple of 16 and another: Triton itself tells these apart
        run(length)
    before = compiled()
    for length in (160, 177, 1000, 1024):
        run(length)
    assert compiled() == before


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", SIMPLEX_POWERS)
def test_rows_on_the_simplex(variant, features, dtype, monkeypatch):
    monkeypatch.setattr(plain, "plain_weights", lambda *_: pytest.fail("no kernel was taken"))
    inputs = [tensor.cuda() for tensor in grid_inputs(2, 2, 1, M, N, 16, 16)]
    assert_matches_reference(inputs, dtype, "products", variant, **on_device(FEATURES[features]))


@pytest.mark.parametrize("keys", [1, 32, 2048, 8192])
@pytest.mark.parametrize("variant", SIMPLEX_POWERS)
def test_long_rows_on_the_simplex(variant, keys):
    inputs = [tensor.cuda() for tensor in grid_inputs(1, 2, 2, 3, keys, 16, 16)]
    assert_matches_reference(inputs, torch.bfloat16, "products", variant)


SIMPLEX_FEATURES = ["full", "causal", "window", "causal window", "lengths", "negative scale"]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("features", SIMPLEX_FEATURES)
@pytest.mark.parametrize("variant", SIMPLEX_POWERS)
def test_kernels_of_the_simplex(variant, features, dtype):
    # At powers of 2 some scores equal sparsemax's threshold exactly, where gradients jump (63 cells at -0.125); at -0.5
    # the 1.5-entmax of plain torch, to compare errors with, is NaN in bf16.
    arguments = {"scale": -0.14} if features == "negative scale" else FEATURES[features]
    check(grid_inputs(2, 4, 2, M, N, 40, 24), dtype, variant, **arguments)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", SIMPLEX_POWERS)
def test_kernels_of_the_simplex_at_every_head_size(variant, size):
    check(grid_inputs(1, 2, 2, M, N, size, size), torch.bfloat16, variant, causal=True, key_lengths=[300])


@pytest.mark.parametrize("features", SIMPLEX_FEATURES)
@pytest.mark.parametrize("variant", NORMALIZED)
def test_kernels_of_normalized_rows(variant, features):
    turn = NORMALIZED.index(variant) + SIMPLEX_FEATURES.index(features)
    check(grid_inputs(2, 4, 2, M, N, 40, 24), [torch.float32, *HALF][turn % 3], variant, **FEATURES[features])


@pytest.mark.parametrize("size", SIZES)
def test_kernels_of_normalized_rows_at_every_head_size(size):
    variant = NORMALIZED[SIZES.index(size) % len(NORMALIZED)]
    check(grid_inputs(1, 2, 2, M, N, size, size), torch.bfloat16, variant, causal=True, key_lengths=[300])


@pytest.mark.parametrize("variant", NORMALIZED)
def test_normalized_rows_of_extreme_scores(variant):
    """Scores from -80 to 80, one tile of keys above the other; and those of a query that is NaN."""
    q = torch.tensor([1.0, -1.0, 0.0, torch.nan], device="cuda", dtype=torch.bfloat16).view(1, 1, 4, 1)
    k, v = (torch.linspace(-end, end, N, device="cuda").to(q).view(1, 1, N, 1) for end in (80, 1))
    assert attention(q, k, v, variant, scale=1.0, backend="fused")[0, 0, 3].isnan().all()
    leaves = [tensor.requires_grad_() for tensor in (q[:, :, :3].clone(), k, v)]
    exact = attention(*(leaf.double() for leaf in leaves), variant, scale=1.0, backend="reference")
    ours = attention(*leaves, variant, scale=1.0, backend="fused")
    # A weight and a value, each rounded once, and the result.
    torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=2**-8)
    for gradient in torch.autograd.grad(ours.sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("keys", [8193, 20000])
@pytest.mark.parametrize("variant", SIMPLEX_POWERS)
def test_rows_that_no_program_can_hold(variant, keys):
    inputs = grid_inputs(1, 2, 2, 130, keys, 16, 16)
    q, k, v, _ = (tensor.cuda().bfloat16() for tensor in inputs)
    assert explain(q, k, v, variant, backend="fused").kernel == "long"
    check(inputs, torch.bfloat16, variant, causal=True)


@pytest.mark.parametrize("variant", [*SIMPLEX_POWERS, *NORMALIZED])
def test_memory_of_rows_is_linear_in_the_length(variant):
    def peak(length):
        leaves = [torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(*leaves, variant, causal=True, backend="fused").float().sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(8320)
    assert peak(33280) <= 4.2 * peak(8320)


@pytest.mark.parametrize("variant", [*SIMPLEX_POWERS, *NORMALIZED])
def test_reruns_of_rows_are_bitwise_equal(variant):
    inputs = [torch.randn(2, 4, 1000, 64, device="cuda") for _ in range(4)]
    first = outputs_and_gradients(inputs, torch.bfloat16, "fused", variant, causal=True)
    for _ in range(20):
        again = outputs_and_gradients(inputs, torch.bfloat16, "fused", variant, causal=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_length_for_all_rows_of_a_cache(variant):
    """As beam search gives it, whether a kernel takes it or plain operations do."""
    q, keys, values, _ = (tensor.cuda() for tensor in grid_inputs(6, 2, 2, 1, 64, 16, 16))
    lengths = torch.tensor([40], device="cuda")
    exact = attention(q, keys[:, :, :40], values[:, :, :40], variant, backend="reference")
    eager = attention(
        *(part.bfloat16() for part in (q, keys[:, :, :40], values[:, :, :40])), variant, backend="reference"
    )
    found = decode_attention(*(part.bfloat16() for part in (q, keys, values)), variant, key_lengths=lengths)
    assert_no_worse(variant, found, eager, exact)


@pytest.mark.parametrize("sizes", [(6, 2, 2, 1, 64, 16), (6, 4, 2, 3, 64, 40), (1, 2, 2, 1, 2000, 64)], ids=str)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if not row.rectified and name != "softmax"])
def test_variants_without_a_decoding_kernel_decode_with_ancestors(variant, sizes):
    """As `test_decoding` has it for the others; a graph of the same step gives the same."""
    q, keys, values, lengths, new, index = decode_inputs(*sizes, torch.bfloat16, True)
    capacity, caches = keys.shape[2], [keys.clone(), values.clone()]
    for cache, part in zip(caches, new, strict=True):
        cache[:, :, capacity - 4] = part[:, :, 0]
    held = [follow(cache, index)[:, :, : capacity - 3] for cache in caches]
    eager = attention(q, *held, variant, backend="reference")
    exact = attention(q.double(), *(cache.double() for cache in held), variant, backend="reference")

    def step():
        return decode_attention(q, keys, values, variant, key_lengths=lengths, new_kv=new, ancestors=index)

    found = step()
    assert_no_worse(variant, found, eager, exact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = step()
    graph.replay()
    assert torch.equal(again, found)
