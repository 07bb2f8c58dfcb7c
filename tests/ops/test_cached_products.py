"""Decoding of variants without a fused kernel: their kernels, run by Triton's interpreter, against the reference."""

import pytest
import torch
from closeness import assert_no_worse, grid

from rectiformer import VARIANTS
from rectiformer.ops import decode, gpu
from rectiformer.ops.attention import check_call
from rectiformer.ops.decode import decode_attention, follow
from rectiformer.ops.reference import reference_attention, reference_weights

pytestmark = pytest.mark.usefixtures("interpreter")
NAMES = [
    name
    for name, row in VARIANTS.items()
    if "products" in row.implementations and row.pointwise is None and name != "softmax"
]
# R, H, K, Q, capacity, D, Dv, then lengths.
CASES = {
    "one length": ((3, 2, 2, 1, 20, 8, 8), [17]),
    "length a row": ((2, 2, 1, 3, 21, 8, 5), [21, 2]),
    "ancestors, length a row": ((3, 2, 1, 3, 19, 5, 8), [19, 1, 7]),
    "ancestors, window": ((2, 4, 2, 1, 40, 8, 5), [37]),
}


class Step:
    """Queries, what is new, and a cache in float64: slices of a larger one, NaN wherever no row has a position."""

    def __init__(self, sizes, lengths, ancestors=False):
        R, H, K, Q, capacity, D, Dv = sizes
        self.lengths, self.ancestors = torch.tensor(lengths), None
        self.q, self.new = grid(R, H, Q, D), (grid(R, K, 1, D, seed=3), grid(R, K, 1, Dv, seed=4))
        own = torch.arange(R)[:, None].expand(R, capacity).contiguous()
        rows, ends = own, self.lengths.expand(R)
        if ancestors:
            rows = torch.randint(R, (R, capacity), generator=torch.Generator().manual_seed(5))
            rows[torch.arange(R), ends - 1] = torch.arange(R)
            self.ancestors = rows.int()
        held = torch.zeros(R, capacity, dtype=torch.bool)
        seen = torch.arange(capacity) < ends[:, None]
        held[rows[seen], torch.arange(capacity).expand(R, capacity)[seen]] = True
        self.caches = []
        for seed, size in enumerate((D, Dv), start=1):
            cache = torch.full((R, K, capacity + 3, size + 2), torch.nan, dtype=torch.float64)[:, :, :capacity, :size]
            self.caches.append(
                cache.copy_(grid(R, K, capacity, size, seed=seed).where(held[:, None, :, None], torch.nan))
            )

    def copies(self, dtype):
        """The caches with their strides."""
        return [cache._base.to(dtype, copy=True)[:, :, : cache.shape[2], : cache.shape[3]] for cache in self.caches]

    def run(self, variant, dtype, new=True, **arguments):
        """The output, keys and values afterwards."""
        keys, values = self.copies(dtype)
        if new:
            arguments["new_kv"] = tuple(part.to(dtype) for part in self.new)
        arguments |= {"key_lengths": self.lengths, "ancestors": self.ancestors}
        with torch.inference_mode():
            return decode_attention(self.q.to(dtype), keys, values, variant, **arguments), keys, values

    def written(self):
        """Keys and values with the new ones where they belong."""
        caches = self.copies(torch.float64)
        for cache, part in zip(caches, self.new, strict=True):
            for row, length in enumerate(self.lengths.expand(len(cache)).tolist()):
                cache[row, :, length - 1] = part[row, :, 0]
        return caches

    def rows(self, caches, dtype, left=None):
        """Queries, keys and values of each row alone, without what it does not see."""
        keys, values = caches if self.ancestors is None else (follow(cache, self.ancestors) for cache in caches)
        for row, length in enumerate(self.lengths.expand(len(keys)).tolist()):
            span = slice(0 if left is None else max(0, length - 1 - left), length)
            yield [part[row, None].to(dtype) for part in (self.q, keys[:, :, span], values[:, :, span])]

    def reference(self, variant, caches, dtype, left=None):
        return torch.cat(
            [reference_attention(*row, call_of(*row, variant), dtype) for row in self.rows(caches, dtype, left)]
        )

    def assert_close(self, variant, out, caches, left=None):
        eager, exact = (self.reference(variant, caches, dtype, left) for dtype in (out.dtype, torch.float64))
        assert_no_worse(variant, out, eager, exact)


def call_of(q, k, v, variant):
    return check_call(q, k, v, variant)


@pytest.fixture(autouse=True)
def _nothing_is_copied(monkeypatch):
    monkeypatch.setattr(decode, "follow", lambda *_: pytest.fail("the cache was copied"))
    monkeypatch.setattr(decode, "run", lambda *_: pytest.fail("no kernel was taken"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", NAMES)
def test_kernels_match_the_reference(variant, dtype, case):
    """New keys are written, and NaN in unwritten positions reaches nothing."""
    step, left = Step(*CASES[case], ancestors="ancestors" in case), 6 if "window" in case else None
    out, *held = step.run(variant, dtype, **({} if left is None else {"window_size": left}))
    caches = step.written()
    step.assert_close(variant, out, caches, left)
    torch.testing.assert_close(held, [cache.to(dtype) for cache in caches], rtol=0, atol=0, equal_nan=True)
    assert out.transpose(1, 2).is_contiguous()  # so that joining the heads moves nothing


@pytest.mark.parametrize("ancestors", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 300, 200, 136), (1, 2, 1, 2, 600, 20, 24)], ids=["wide", "long"])
@pytest.mark.parametrize("variant", ["cog", "entmax15"])
def test_many_blocks_shared_by_splits_and_nothing_new(variant, sizes, ancestors, monkeypatch):
    monkeypatch.setattr(gpu.cached_products, "CACHE_PROGRAMS", 3)  # each has several blocks
    step = Step(sizes, [sizes[4] - 7], ancestors)
    assert gpu.decode_tiles.count_splits(step.q, step.caches[0]) > 1
    for left in (None, 150):
        out, *_ = step.run(variant, torch.float32, new=False, **({} if left is None else {"window_size": left}))
        step.assert_close(variant, out, step.caches, left)


@pytest.mark.parametrize("variant", ["sparsemax", "topk"])
def test_values_that_weigh_nothing_are_not_read(variant):
    """NaN times 0 would show. A whole block weighs nothing."""
    step = Step((1, 2, 2, 1, 150, 8, 5), [150])
    step.caches[0][:, :, 20:] = -step.q.sign()
    (row,) = step.rows(step.caches, torch.float64)
    nothing = reference_weights(*row[:2], call_of(*row, variant))[:, :, 0] == 0  # [R, H, capacity]
    assert nothing[:, :, 64:].all()
    expected = step.reference(variant, step.caches, torch.float64)
    step.caches[1][nothing] = torch.nan
    out, *_ = step.run(variant, torch.float32, new=False)
    torch.testing.assert_close(out.double(), expected)


@pytest.mark.parametrize("variant", ["sparsemax", "sigmoid"])
def test_a_row_without_keys_is_zero(variant):
    step = Step((2, 2, 2, 1, 20, 8, 5), [0, 20])
    out, *_ = step.run(variant, torch.float32, new=False)
    assert not out[0].any()
    assert out[1].any()


@pytest.mark.parametrize("splits", [1, 2])
def test_the_operators_are_well_formed(splits):
    keys, values, lengths = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 5), torch.tensor([9, 9])
    ancestors = torch.zeros(2, 9, dtype=torch.int32)
    q = torch.randn(2, 4, 3, 4)
    scores = (q, keys, lengths, ancestors, 1 << 30)
    torch.library.opcheck(torch.ops.rectiformer.cache_scores.default, scores)
    mix = (torch.randn(2, 4, 3, 9), values, lengths, ancestors, 1 << 30, splits, torch.bfloat16)
    torch.library.opcheck(torch.ops.rectiformer.cache_mix.default, mix)


def test_what_the_kernels_do_not_do_goes_step_by_step(monkeypatch):
    taken = []
    monkeypatch.setattr(decode, "run", lambda q, k, v, call, _: taken.append(1) or q)
    monkeypatch.setattr(gpu.cached_products, "cached_products", lambda *_: pytest.fail("a kernel was taken"))

    def step(variant="entmax", dtype=torch.float32, D=4, Q=1, gradient=False, **options):
        q, keys, values = (torch.ones(1, 1, length, D, dtype=dtype) for length in (Q, 5, 5))
        q = q.requires_grad_() if gradient else q
        decode_attention(q, keys, values, variant, key_lengths=torch.tensor([3]), **options)

    step(gradient=True)
    step(alpha=torch.tensor(1.5, requires_grad=True))
    step("inhibitor")
    step(dtype=torch.float64)
    step(D=257)
    step(Q=65)
    torch.func.vmap(lambda x: step() or x)(torch.ones(1))
    monkeypatch.setattr(gpu, "TRITON", False)
    step()
    monkeypatch.setattr(gpu, "TRITON", True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    step()
    assert len(taken) == 9
