"""Decoding with a cache: the kernels, run by Triton's interpreter, and the plain steps against the reference."""

import pytest
import torch
from closeness import OPTIONS, assert_no_worse, grid, grid_inputs

from rectiformer import VARIANTS
from rectiformer.config import ModelConfig
from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.model.transformer import Encoded, Transformer
from rectiformer.ops import gpu
from rectiformer.ops.attention import check_call
from rectiformer.ops.decode import decode_attention, follow
from rectiformer.ops.gpu import decode_obstacle
from rectiformer.ops.norm import OutputNorm, plain_rms_norm
from rectiformer.ops.reference import reference_attention

# One of each kind: the ReLA variants are one computation. Rows with a normalizer decode by cached products.
FUSED = [name for name, row in VARIANTS.items() if "fused" in row.implementations and not row.rowwise]
KINDS = [name for name in FUSED if name not in ("rela-i", "rela-g")]
# R, H, K, Q, capacity, D, Dv: all heads in one program, one head per program, groups of queries.
SHAPES = {
    "together": (2, 2, 2, 1, 21, 8, 5),
    "long": (1, 2, 2, 1, 150, 8, 5),
    "grouped": (1, 4, 2, 1, 40, 8, 5),
    "beam": (2, 4, 2, 3, 40, 8, 5),
    "wide": (1, 1, 1, 1, 20, 200, 136),
}
EPSILON = 1e-8
# Splits meet every kind and every shape, but not every pair of them: interpreting is slow.
SPLITS = [
    (kind, shape, (None, 3)[(row + column) % 2])
    for row, kind in enumerate(KINDS)
    for column, shape in enumerate(SHAPES)
]


kernels_run = pytest.mark.usefixtures("interpreter")


class Step:
    """Queries, a cache and what is new, in float64; positions beyond the lengths hold NaN."""

    def __init__(self, R, H, K, Q, capacity, D, Dv, lengths=None):
        self.q, self.keys, self.values = (
            grid(R, H, Q, D),
            grid(R, K, capacity, D, seed=1),
            grid(R, K, capacity, Dv, seed=2),
        )
        self.new = grid(R, K, 1, D, seed=3), grid(R, K, 1, Dv, seed=4)
        self.lengths = torch.tensor(lengths or ([capacity - 3] if R == 1 else [capacity, 1]))
        for held in (self.keys, self.values):
            held.masked_fill_((torch.arange(capacity) >= self.lengths.expand(R)[:, None])[:, None, :, None], torch.nan)

    def run(self, variant, dtype=torch.float32, append=True, **arguments):
        """The output, keys and values afterwards."""
        arguments = OPTIONS.get(variant, {}) | arguments
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        if append:
            arguments["new_kv"] = tuple(new.to(dtype) for new in self.new)
        out = decode_attention(self.q.to(dtype), keys, values, variant, key_lengths=self.lengths, **arguments)
        return out, keys, values

    def written(self):
        """Keys and values with the new ones where they belong."""
        keys, values = self.keys.clone(), self.values.clone()
        for row, length in enumerate(self.lengths.expand(len(keys)).tolist()):
            keys[row, :, length - 1], values[row, :, length - 1] = self.new[0][row, :, 0], self.new[1][row, :, 0]
        return keys, values

    def reference(self, variant, dtype, keys, values, left=None, precision=None, **options):
        """What the reference makes of each row alone, which it sees without any padding."""
        rows = []
        for row, length in enumerate(self.lengths.expand(len(self.q)).tolist()):
            q, k, v = self.q[row, None], keys[row, None, :, :length], values[row, None, :, :length]
            if left is not None:
                k, v = k[:, :, -left - 1 :], v[:, :, -left - 1 :]
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            call = check_call(q, k, v, variant, options=OPTIONS.get(variant, {}) | options)
            rows.append(reference_attention(q, k, v, call, precision=precision))
        return torch.cat(rows)


def assert_close_to_reference(step, variant, ours, keys, values, **arguments):
    exact = step.reference(variant, torch.float64, keys, values, **arguments)
    eager = step.reference(variant, torch.float32, keys, values, precision=torch.float32, **arguments)
    assert_no_worse(variant, ours, eager, exact)


@kernels_run
@pytest.mark.parametrize(("variant", "shape", "splits"), SPLITS)
def test_kernels_match_the_reference(variant, shape, splits):
    """New keys are written, and NaN in unwritten positions reaches nothing."""
    step = Step(*SHAPES[shape])
    keys, values = step.written()
    out, held_keys, held_values = step.run(variant, splits=splits)
    assert_close_to_reference(step, variant, out, keys, values)
    torch.testing.assert_close((held_keys, held_values), (keys.float(), values.float()), rtol=0, atol=0, equal_nan=True)
    assert out.transpose(1, 2).is_contiguous()  # so that joining the heads moves nothing


@kernels_run
@pytest.mark.parametrize(("shape", "left"), [("together", 0), ("long", 6), ("beam", 0), ("beam", 6)])
@pytest.mark.parametrize("variant", ["reluformer", "softmax", "sigmoid", "threshold"])
def test_a_window_shows_the_last_keys_and_counts_them(variant, shape, left):
    step = Step(*SHAPES[shape])
    out, *_ = step.run(variant, window_size=left, splits=2)
    assert_close_to_reference(step, variant, out, *step.written(), left=left)


@kernels_run
@pytest.mark.parametrize("shape", ["together", "grouped"])
@pytest.mark.parametrize("variant", KINDS)
def test_nothing_is_written_where_nothing_is_new(variant, shape):
    step = Step(*SHAPES[shape])
    step.keys, step.values = step.written()
    out, keys, values = step.run(variant, append=False)
    assert_close_to_reference(step, variant, out, step.keys, step.values)
    held = step.keys.float(), step.values.float()
    torch.testing.assert_close((keys, values), held, rtol=0, atol=0, equal_nan=True)


@kernels_run
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("shape", ["together", "beam"])
def test_a_row_without_keys_is_zero(variant, shape):
    step = Step(*SHAPES[shape], lengths=[0])
    assert not step.run(variant, append=False, splits=2)[0].any()


@kernels_run
@pytest.mark.parametrize("beta", [torch.tensor([0.125, 0.5]), 0.25, torch.tensor(0.25)], ids=str)
@pytest.mark.parametrize("shape", ["together", "long"])
def test_thresholds_of_the_heads_close_their_rows(shape, beta):
    step = Step(*SHAPES[shape])
    out, *_ = step.run("threshold", splits=2, beta=beta)
    assert_close_to_reference(step, "threshold", out, *step.written(), beta=beta)


@kernels_run
@pytest.mark.parametrize("options", [{"gamma": torch.tensor([0.5, 2.0])}, {"gamma": 3.0}, {"gamma": torch.tensor(2.0)}])
@pytest.mark.parametrize("shape", ["together", "long"])
def test_factors_of_the_heads_scale_their_rows(shape, options):
    step = Step(*SHAPES[shape])
    out, *_ = step.run("reluformer", splits=2, **options)
    assert_close_to_reference(step, "reluformer", out, *step.written(), **options)


@kernels_run
@pytest.mark.parametrize("exponent", [0.0, 0.75])
@pytest.mark.parametrize("shape", ["together", "beam"])
def test_any_exponent_scales_the_rows(shape, exponent):
    step = Step(*SHAPES[shape])
    out, *_ = step.run("relu2", exponent=exponent)
    assert_close_to_reference(step, "relu2", out, *step.written(), exponent=exponent)


@kernels_run
@pytest.mark.parametrize("variant", ["rela", "softmax"])
@pytest.mark.parametrize("shape", ["together", "beam"])
def test_inputs_may_lie_in_any_order_and_scales_be_negative(shape, variant):
    step = Step(*SHAPES[shape])
    keys, values = step.written()
    expected = decode_attention(step.q.float(), keys.float(), values.float(), variant, key_lengths=step.lengths)
    q, keys, values = (tensor.float().mT.contiguous().mT for tensor in (step.q, keys, values))
    lengths = torch.stack([step.lengths, step.lengths * 0], 1)[:, 0]
    scale = -(q.shape[3] ** -0.5)
    assert torch.equal(decode_attention(-q, keys, values, variant, key_lengths=lengths, scale=scale), expected)


@kernels_run
@pytest.mark.parametrize("shape", ["together", "beam"])
@pytest.mark.parametrize("variant", KINDS)
def test_ancestors_stand_for_a_cache_that_was_moved(variant, shape):
    """Bit for bit, and in the cache only the new position changes."""
    step = Step(*SHAPES[shape], lengths=[17])
    rows, capacity = len(step.keys), step.keys.shape[2]
    ancestors = torch.randint(rows, (rows, capacity), dtype=torch.int32)
    expected = Step(*SHAPES[shape], lengths=[17])
    expected.keys, expected.values = follow(step.keys, ancestors), follow(step.values, ancestors)
    out, keys, _ = step.run(variant, ancestors=ancestors)
    assert torch.equal(out, expected.run(variant)[0])
    torch.testing.assert_close(keys, step.written()[0].float(), rtol=0, atol=0, equal_nan=True)


@kernels_run
@pytest.mark.parametrize("shape", ["together", "long", "wide"])
@pytest.mark.parametrize("variant", ["rela", "reluformer", "relu2", "threshold"])
def test_leaving_out_values_that_weigh_nothing_changes_no_bit(variant, shape):
    step = Step(*SHAPES[shape])
    assert torch.equal(*(step.run(variant, skip=skip)[0] for skip in (False, True)))


@kernels_run
def test_values_that_weigh_nothing_are_not_read():
    """NaN times 0 would show."""
    step = Step(*SHAPES["long"])
    below = (step.q @ step.keys.mT <= 0)[:, :, 0]  # [R, H, capacity]
    step.values[below] = torch.nan
    out, *_ = step.run("rela", append=False, skip=True)
    assert below.any()
    assert out.isfinite().all()


@kernels_run
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", ["together", "long", "beam"])
def test_the_output_norm_is_that_of_all_heads_together(shape, gated):
    step = Step(*SHAPES[shape])
    width = step.q.shape[1] * step.values.shape[3]
    gain, gate = 1 + grid(width, seed=5) / 8, grid(width, seed=6) if gated else None

    def normed(mixed, dtype):
        parts = [None if part is None else part.to(dtype) for part in (gain, gate)]
        joined = plain_rms_norm(mixed.transpose(1, 2).flatten(2), *parts, EPSILON)
        return joined.unflatten(2, (step.q.shape[1], -1)).transpose(1, 2)

    out, *_ = step.run("rela", norm=OutputNorm(gain.float(), gate if gate is None else gate.float(), EPSILON))
    exact = normed(step.reference("rela", torch.float64, *step.written()), torch.float64)
    eager = normed(step.reference("rela", torch.float32, *step.written(), precision=torch.float32), torch.float32)
    assert_no_worse("normed", out, eager, exact)


@pytest.mark.parametrize("shape", ["together", "beam"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_steps_match_the_reference(monkeypatch, variant, shape):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    step = Step(*SHAPES[shape])
    for left in (None, 4):
        out, keys, _ = step.run(variant, **({} if left is None else {"window_size": left}))
        assert_close_to_reference(step, variant, out, *step.written(), left=left)
        torch.testing.assert_close(keys, step.written()[0].float(), rtol=0, atol=0, equal_nan=True)


@kernels_run
@pytest.mark.parametrize("variant", ["rela-g", "softmax"])
def test_a_model_decodes_by_the_kernels_as_without_them(monkeypatch, variant):
    model = Transformer(
        ModelConfig(hidden_size=16, num_heads=2, ffn_size=16, decoder_layers=2, variant=variant), 23, 23, 2
    ).eval()
    fused, decode = [], gpu.decode.fused_decoding
    monkeypatch.setattr(gpu.decode, "fused_decoding", lambda *a, **given: fused.append(1) or decode(*a, **given))
    results = []
    for interpreted in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode():
            state = model.begin_static(Encoded(torch.randn(2, 5, 16, generator=generator), torch.tensor([5, 3])), 3, 8)
            logits = []
            for _ in range(5):
                logits.append(model.step(torch.randint(3, 23, (6,), generator=generator), state))
                state.static.parents.copy_(
                    torch.randint(3, (6,), generator=generator) + torch.tensor([0, 0, 0, 3, 3, 3])
                )
        results.append(torch.stack(logits))
    torch.testing.assert_close(*results)
    assert len(fused) == 5 * 2


@kernels_run
@pytest.mark.parametrize(("function", "power", "splits"), [("relu", 1, 1), ("relu", 0, 2), ("sigmoid", 1, 2)])
def test_the_operator_is_well_formed(function, power, splits):
    step = Step(2, 2, 2, 1, 9, 4, 4, lengths=[9, 4])
    q, keys, values, *new = (tensor.float() for tensor in (step.q, step.keys, step.values, *step.new))
    ancestors = torch.zeros(2, 9, dtype=torch.int32)
    rest = (step.lengths, ancestors, *[None] * 4, function, power, "", 0.0, 0.5, 0.5, 1.0, 0.0, 1 << 30, splits)
    rest = (*rest, False, False, False)
    torch.library.opcheck(
        torch.ops.rectiformer.decode.default, (q, keys.nan_to_num(), values.nan_to_num(), *new, *rest)
    )


@kernels_run
def test_where_gradients_are_asked_for_the_plain_steps_give_them():
    step = Step(*SHAPES["together"])
    q = step.q.float().requires_grad_()
    keys, values = (held.float().nan_to_num() for held in (step.keys, step.values))
    out = decode_attention(q, keys, values, key_lengths=step.lengths)
    assert torch.autograd.grad(out.sum(), q)[0].any()
    with torch.no_grad():
        torch.testing.assert_close(decode_attention(q, keys, values, key_lengths=step.lengths), out.detach())


def test_shapes_decide_how_the_keys_are_shared():
    pytest.importorskip("triton")
    from rectiformer.ops.gpu.decode_tiles import count_splits, holds_all_heads

    def shape(R, H, capacity, D=64):
        return torch.empty(R, H, 1, D, device="meta"), torch.empty(R, H, capacity, D, device="meta")

    for sizes, whole in [((512, 8, 32), True), ((512, 8, 256), False), ((1, 32, 32), False), ((1, 5, 128, 100), True)]:
        q, keys = shape(*sizes)
        assert holds_all_heads(q, keys, keys) is whole
    assert count_splits(*shape(1, 1, 100_000)) == 4  # of one processor, as the interpreter is
    assert count_splits(*shape(1, 1, 300)) == 2
    assert count_splits(*shape(512, 8, 100_000)) == 1


# rows, heads, key heads, keys, head size; splits, values of zeros unread, one query row per program, small blocks:
# what was fastest on an H200 (docs/log.md)
SHARED = [
    ((1, 32, 8, 512, 128), (8, False, False, True)),
    ((1, 32, 8, 2048, 128), (16, True, False, True)),
    ((1, 32, 8, 8192, 128), (16, True, False, True)),
    ((8, 32, 8, 512, 128), (1, False, False, True)),
    ((8, 32, 8, 2048, 128), (4, True, False, True)),
    ((8, 32, 8, 8192, 128), (4, True, False, False)),
    ((64, 32, 8, 2048, 128), (1, True, False, False)),
    ((8, 8, 8, 512, 64), (1, False, False, True)),
    ((1, 8, 8, 2048, 64), (32, True, True, True)),
    ((8, 8, 8, 2048, 64), (16, True, True, True)),
    ((8, 8, 8, 8192, 64), (8, True, True, False)),
    ((64, 8, 8, 2048, 64), (1, True, True, False)),
]


@pytest.mark.parametrize(("sizes", "expected"), SHARED, ids=str)
def test_a_device_with_idle_processors_shares_keys_otherwise(sizes, expected, monkeypatch):
    pytest.importorskip("triton")
    from rectiformer.ops.gpu import decode_tiles

    monkeypatch.setattr(decode_tiles, "count_sms", lambda q: 132)
    R, H, K, N, D = sizes
    q = torch.empty(R, H, 1, D, device="meta", dtype=torch.bfloat16)
    keys = torch.empty(R, K, N, D, device="meta", dtype=torch.bfloat16)
    splits, skip, together = decode_tiles.choose_splits(q, keys, keys)
    assert not together
    assert (splits, skip, decode_tiles.takes_one_row(q, keys), decode_tiles.takes_small_blocks(q, keys)) == expected


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("capacity", [60, 300])
def test_idle_processors_change_no_result(capacity, monkeypatch):
    """The kernel for several rows takes one row, and small blocks are shared by many splits."""
    from rectiformer.ops.gpu import decode_tiles

    monkeypatch.setattr(decode_tiles, "count_sms", lambda q: 12)
    q, k, v, _ = (tensor.float() for tensor in grid_inputs(2, 2, 2, 1, capacity, 8, 8))
    assert decode_tiles.takes_one_row(q.half(), k) is (capacity == 60)
    for dtype in (torch.float16, torch.float32):
        found = decode_attention(*(part.to(dtype) for part in (q, k, v)), key_lengths=torch.tensor([capacity, 50]))
        exact = decode_attention(q.double(), k.double(), v.double(), key_lengths=torch.tensor([capacity, 50]))
        assert_no_worse(str(dtype), found, exact.to(dtype), exact)


REFUSED = [
    ({"keys": (3, 1, 9, 4)}, ShapeError, "v_cache has K = 2 but k_cache has K = 1"),
    ({"keys": (3, 3, 9, 4), "values": (3, 3, 9, 4)}, ShapeError, "k_cache has 3 heads, which do not divide the 4 of q"),
    ({"lengths": (2,)}, ShapeError, r"key_lengths is \[2\], but it needs \[3\], one per row, or \[1\]"),
    ({"new": (3, 2, 2, 4)}, ShapeError, "new key has 2 positions, but one is written at a time"),
    ({"ancestors": (3, 9)}, ArgumentError, "ancestors holds torch.float32, but rows are counted in torch.int32"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_what_does_not_fit_is_named(given, error, message):
    shapes = {"q": (3, 4, 1, 4), "keys": (3, 2, 9, 4), "values": (3, 2, 9, 4), "lengths": (3,)}
    tensors = {name: torch.ones(given.get(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(error, match=message):
        decode_attention(
            tensors["q"],
            tensors["keys"],
            tensors["values"],
            given.get("variant", "rela"),
            key_lengths=tensors["lengths"].long(),
            new_kv=(torch.ones(given["new"]),) * 2 if "new" in given else None,
            ancestors=torch.ones(given["ancestors"]) if "ancestors" in given else None,
        )


def test_scale_and_lengths_are_checked_as_those_of_attention():
    tensors = [torch.ones(3, 2, 4, 4)] * 3
    with pytest.raises(ArgumentError, match="scale = nan, but it must be a finite number"):
        decode_attention(*tensors, key_lengths=torch.tensor([4]), scale=float("nan"))
    with pytest.raises(ArgumentError, match=r"key_lengths holds torch.float32, but lengths are whole numbers"):
        decode_attention(*tensors, key_lengths=torch.tensor([4.0]))


OBSTACLES = [
    ("sparsemax", (1, 2, 2, 1, 9, 4, 4), torch.float32, "variant 'sparsemax' has no fused kernel"),
    ("rela", (1, 2, 2, 1, 9, 4, 4), torch.float64, "it takes one of float32, bfloat16 and float16"),
    ("rela", (1, 2, 2, 1, 9, 257, 4), torch.float32, "it takes head sizes up to 256"),
    ("rela", (1, 66, 2, 2, 9, 4, 4), torch.float32, "it takes up to 64 query rows per key head"),
]


@kernels_run
@pytest.mark.parametrize(("variant", "sizes", "dtype", "reason"), OBSTACLES)
def test_what_the_kernels_cannot_do_is_known(variant, sizes, dtype, reason):
    step = Step(*sizes)
    q, k, v = (tensor.to(dtype) for tensor in (step.q, step.keys, step.values))
    call = check_call(q, k, v, variant)
    assert reason in decode_obstacle(q, k, v, call)
