"""Launch plans: eager calls of one layout share one, and it never answers for a call that differs."""

import ctypes
import threading

import pytest
import torch
from closeness import assert_no_worse, grid_inputs

from rectiformer import attention, attention_varlen, decode_attention
from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops import attention as attention_module
from rectiformer.ops import decode as decode_module
from rectiformer.ops import gpu
from rectiformer.ops import varlen as varlen_module
from rectiformer.ops.gpu import plans
from rectiformer.ops.gpu.common import PackedPlan

pytestmark = pytest.mark.usefixtures("interpreter")
LONG, SHORT = (1, 2, 2, 70, 140, 8, 8), (2, 2, 2, 5, 7, 8, 8)


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    """Each test begins without plans."""
    monkeypatch.setattr(attention_module, "SHORTCUTS", plans.PlanCache())
    monkeypatch.setattr(decode_module, "SHORTCUTS", plans.PlanCache())
    monkeypatch.setattr(plans, "PLANS", plans.PlanCache())


@pytest.fixture
def checks(monkeypatch):
    """The calls whose arguments were checked."""
    checked, check = [], attention_module.check_call
    monkeypatch.setattr(attention_module, "check_call", lambda *a, **given: checked.append(a[3]) or check(*a, **given))
    return checked


def inputs_of(sizes):
    return [tensor.float() for tensor in grid_inputs(*sizes)]


def results(inputs, **given):
    """Output and gradients of one call."""
    *leaves, upstream = inputs
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = attention(*leaves, backend="fused", **given)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("sizes", [SHORT, LONG], ids=["short", "long"])
def test_a_call_is_checked_once_for_its_layout(sizes, checks):
    inputs = inputs_of(sizes)
    first, again = (results(inputs, variant="relu2", causal=True) for _ in range(2))
    assert checks == ["relu2"]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    other = results([2 * tensor for tensor in inputs], variant="relu2", causal=True)
    assert checks == ["relu2"]
    assert not torch.equal(other[0], first[0])


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True}, {"scale": 0.3}, {"scale": -0.3}, {"window_size": (2, 1)}, {"window_size": 2},
        {"variant": "relu2"}, {"variant": "reluformer", "gamma": 2.0}, {"variant": "reluformer", "gamma": 3.0},
        {"key_lengths": [3, 7]}, {"attn_mask": torch.arange(7) != 3}, {"attn_bias": torch.full((7,), 0.7)},
        {"dropout_p": 0.5, "seed": 3}, {"dropout_p": 0.5, "seed": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_in_an_argument_has_another_plan(change):
    q, k, v = inputs_of(SHORT)[:3]
    for given in ({"variant": "rela"}, {"variant": "rela"} | change, {"variant": "rela"}, {"variant": "rela"} | change):
        torch.testing.assert_close(
            attention(q, k, v, backend="fused", **given), attention(q, k, v, backend="reference", **given)
        )


@pytest.mark.parametrize("sizes", [(4, 4, 2, 21, 30, 8, 8), (1, 2, 2, 70, 140, 24, 8)], ids=["short", "long"])
def test_cosine_scores_have_a_plan_of_their_own(sizes, checks):
    """Queries and keys are normed by kernels, with first and second derivatives."""
    given = {"variant": "threshold", "beta": 0.25, "causal": True}
    inputs = [torch.randn_like(tensor) for tensor in inputs_of(sizes)]
    for _ in range(2):
        found = results(inputs, **given)
    assert checks == ["threshold"]
    twice = [
        with_second_derivatives([tensor.to(dtype) for tensor in inputs], backend=backend, **given)
        for backend, dtype in (("fused", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    ]
    for index, (fused, eager, exact) in enumerate(zip(*twice, strict=True)):
        assert_no_worse(f"result {index}", fused, eager, exact)
        if index < len(found):  # the same without second derivatives, by kernels alone
            assert_no_worse(f"result {index}", found[index], eager, exact)


@pytest.mark.parametrize("queries", [1, 3])
def test_cosine_scores_decode_alike_when_a_layout_comes_again(queries, monkeypatch):
    monkeypatch.setattr(attention_module, "is_readable", lambda table: False)  # as lengths on a GPU are
    q, k, v, _ = (torch.randn_like(tensor) for tensor in inputs_of((2, 4, 2, queries, 20, 8, 8)))
    given = {"variant": "threshold", "beta": 0.25, "key_lengths": torch.tensor([20, 9])}
    first, again = (decode_attention(q, k, v, **given) for _ in range(2))
    assert first.any()
    assert torch.equal(first, again)


@pytest.mark.parametrize("most", [30, None], ids=["short", "long"])
def test_packed_sequences_give_the_same_bits_when_a_layout_comes_again(most, monkeypatch):
    """By short kernels without the views of the first time; queries, keys and values may share a tensor."""
    monkeypatch.setattr(attention_module, "is_readable", lambda table: False)  # as bounds on a GPU are
    kept = plans.PlanCache()
    monkeypatch.setattr(varlen_module, "SHORTCUTS", kept)
    bounds = torch.tensor([0, 12, 12, 17, 47])
    qkv = torch.randn(47, 3, 2, 8).requires_grad_()
    upstreams = torch.randn(47, 2, 8), torch.ones(47, 1, 1).expand(47, 2, 8)

    def results(backend):
        given = {"causal": True, "max_seqlen_q": most, "max_seqlen_k": most, "backend": backend}
        out = attention_varlen(*qkv.unbind(1), bounds, bounds, "relu2", **given)
        grads = [torch.autograd.grad(out, qkv, upstream, retain_graph=True)[0] for upstream in upstreams]
        return [out.detach(), *grads]

    (first, *again), exact = [results("fused") for _ in range(3)], results("reference")
    assert [type(plan) for plan in kept.values()][:1] == [PackedPlan]
    assert all(torch.equal(one, other) for each in again for one, other in zip(first, each, strict=True))
    for fused, right in zip(first, exact, strict=True):
        torch.testing.assert_close(fused, right)


def with_second_derivatives(inputs, **given):
    """Output, gradients, and the gradients of one of these."""
    *leaves, upstream = (tensor.clone().requires_grad_() for tensor in inputs)
    out = attention(*leaves, **given)
    first = torch.autograd.grad(out, leaves, upstream, create_graph=True)
    return [
        out.detach(),
        *(x.detach() for x in first),
        *torch.autograd.grad(first[0].square().sum(), [*leaves, upstream]),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: x[:, :, :-1],
        lambda x: x[:1],
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),  # 4 bytes beyond a multiple of 16
    ],
    ids=["heads last", "wider rows", "fewer", "batch of 1", "unaligned"],
)
@pytest.mark.parametrize("sizes", [SHORT, LONG], ids=["short", "long"])
def test_what_differs_in_layout_has_another_plan(sizes, change):
    inputs = inputs_of(sizes)[:3]
    for tensors in (inputs, [change(tensor) for tensor in inputs], inputs, [change(tensor) for tensor in inputs]):
        fused, exact = (attention(*tensors, backend=backend) for backend in ("fused", "reference"))
        torch.testing.assert_close(fused, exact)


def test_the_gradient_of_the_output_may_have_any_layout():
    inputs = [tensor.requires_grad_() for tensor in inputs_of(SHORT)[:3]]
    grads = []
    for backend in ("fused", "reference"):
        for upstream in (lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x[..., :1].expand(x.shape)):
            out = attention(*inputs, backend=backend)
            grads.append(torch.autograd.grad(out, inputs, upstream(torch.ones_like(out).cumsum(2))))
    for fused, exact in zip(grads[:3], grads[3:], strict=True):
        torch.testing.assert_close(fused, exact)


def test_gradients_of_gradients_go_through_the_operator():
    q, k, v = (tensor.requires_grad_() for tensor in inputs_of(SHORT)[:3])
    seconds = []
    for backend in ("fused", "reference"):
        (first,) = torch.autograd.grad(attention(q, k, v, backend=backend).square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    torch.testing.assert_close(*seconds)


def test_errors_are_raised_every_time(checks):
    q, k, v = inputs_of(SHORT)[:3]
    for _ in range(2):
        with pytest.raises(ShapeError):
            attention(q, k[..., :4], v, backend="fused")
        with pytest.raises(ArgumentError):
            attention(q, k, v, scale=float("nan"), backend="fused")
        with pytest.raises(ArgumentError):
            attention(q, k, v, "reluformer", gamma=-1.0, backend="fused")
    assert not attention_module.SHORTCUTS


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    "given",
    [{}, {"causal": True}, {"window_size": (3, 0)}, {"variant": "relu2", "scale": 0.3}, {"variant": "softmax"}],
    ids=str,
)
def test_generation_is_checked_once_while_its_keys_grow(heads, key_heads, given, checks):
    """One query, and one key more in every call: no call is checked or planned for each length."""
    (q, *_), checked = inputs_of((2, heads, key_heads, 1, 1, 8, 8)), 0
    for keys in (1, 2, 15, 16, 17, 70, 128, 131, 144, 145):
        _, k, v, _ = inputs_of((2, heads, key_heads, 1, keys, 8, 8))
        with torch.no_grad():
            fused = attention(q, k, v, backend="fused", **given)
            checked += 1 if keys == 1 else 0
            assert len(checks) == checked
            exact = attention(q, k, v, backend="reference", **given)
            checked += 1
        torch.testing.assert_close(fused, exact)


def test_generation_with_gradients_goes_another_way():
    q, k, v, upstream = inputs_of((2, 4, 2, 1, 145, 8, 8))
    with torch.no_grad():
        expected = attention(q, k, v, backend="fused")
    found = []
    for backend in ("fused", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = attention(*leaves, backend=backend)
        torch.testing.assert_close(out.detach(), expected)
        found.append(torch.autograd.grad(out, leaves, upstream))
    torch.testing.assert_close(*found)


def test_dispatch_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    q, k, v = inputs_of(SHORT)[:3]
    attention(q, k, v, backend="fused")
    with Names():
        attention(q, k, v, backend="fused")
    assert "rectiformer.short.default" in seen


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for keys in range(2, 12):
        q, k, v = inputs_of((1, 1, 1, 2, keys, 4, 4))[:3]
        torch.testing.assert_close(attention(q, k, v, backend="fused"), attention(q, k, v, backend="reference"))
        assert len(plans.PLANS) <= 3
        assert len(attention_module.SHORTCUTS) <= 3


def test_threads_share_plans(monkeypatch):
    one_at_a_time, launch = threading.Lock(), gpu.launch.Launch.launch_by_triton

    def launch_alone(self, *given):  # the interpreter is one for all threads
        with one_at_a_time:
            launch(self, *given)

    monkeypatch.setattr(gpu.launch.Launch, "launch_by_triton", launch_alone)
    cases = [inputs_of((1, 2, 2, 3, keys, 4, 4))[:3] for keys in (3, 5, 9)]
    exact = [attention(*case, backend="reference") for case in cases]
    found = [[] for _ in range(4)]

    def work(results):
        for _ in range(5):
            results.extend(attention(*case, backend="fused") for case in cases)

    threads = [threading.Thread(target=work, args=(results,)) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found:
        assert len(results) == 15
        for index, result in enumerate(results):
            torch.testing.assert_close(result, exact[index % 3])


def test_tritons_private_interface_is_the_one_we_know():
    """If this fails, eager calls still work but launch slower: read ops/gpu/launch.py next to the new Triton."""
    assert gpu.launch.launch_obstacle.__wrapped__() == ""


class Metadata:
    """Of a compiled kernel that asks for nothing special."""

    num_warps, shared, num_ctas = 4, 1024, 1
    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0
    tensordesc_meta = None


class Kernel:
    """As much of a JIT function, and of what it compiles to, as a launch uses."""

    signature = {  # noqa: RUF012
        "q": "*fp32", "k": "*fp32", "q_ptr": "*fp32", "k_ptr": "*fp32", "out_ptr": "*fp32",
        "strides": ("i32", "constexpr"), "count": "i64", "scale": "fp32", "FLAG": "constexpr",
    }  # fmt: skip

    def __init__(self):
        self.src, self.metadata, self.function, self.name = self, Metadata(), 7, "kernel"
        self.by_triton, self.by_driver = [], []

    def __getitem__(self, grid):
        return lambda *arguments, **flags: self.by_triton.append((grid, arguments, flags)) or self

    def cuLaunchKernel(self, function, *shape_and_stream):  # noqa: N802
        """Reads the arguments from memory, as the driver does."""
        *shape, stream, where, _ = shape_and_stream
        kinds = [ctypes.c_uint64] * 5 + [ctypes.c_int32, ctypes.c_int64, ctypes.c_float] + [ctypes.c_uint64] * 2
        pointers = (ctypes.c_void_p * len(kinds)).from_address(where)
        read = [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]
        self.by_driver.append((function, *shape, stream, read))
        return 0


def repeat_launch(monkeypatch, tensors, numbers=None):
    """A launch made twice: what Triton launched, and what the driver got."""
    kernel = Kernel()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(gpu.launch, "driver", lambda: kernel)
    flags = {"FLAG": True, "num_warps": 4}
    launch = gpu.launch.Launch(kernel, (3, 2), tensors, [0, 1, 2], ((8, 1), 5, 0.5), flags, tiles=(None, None))
    launch(tensors)
    launch(tensors, numbers)
    return kernel


@pytest.mark.parametrize("numbers", [None, ((24, 1), 6, 0.25)])
def test_the_second_launch_goes_straight_to_the_driver(monkeypatch, numbers):
    tensors = [torch.zeros(2, 8) for _ in range(3)]
    kernel = repeat_launch(monkeypatch, tensors, numbers)
    q, k, out = (tensor.data_ptr() for tensor in tensors)
    (stride, _), count, scale = numbers or ((8, 1), 5, 0.5)
    assert len(kernel.by_triton) == 1
    assert kernel.by_driver == [(7, 3, 2, 1, 128, 1, 1, 1024, 99, [q, k, q, k, out, stride, count, scale, 0, 0])]


def test_descriptors_are_made_once_for_each_address(monkeypatch):
    """They come before all else, each followed by the shape and strides of its tensor."""
    made, maps = [], []
    kernel, fill = Kernel(), lambda *given: made.append(given) or maps.append(object()) or maps[-1]
    monkeypatch.setattr(gpu.launch, "MAX_MAPS", 2)
    monkeypatch.setattr(Metadata, "tensordesc_meta", [
        {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 8], "fp4_padded": False}
    ])  # fmt: skip
    monkeypatch.setattr(gpu.launch, "driver", lambda: kernel)
    monkeypatch.setattr(gpu.launch, "map_filler", lambda: fill)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    kernel.signature = {"q": "tensordesc<fp32[1, 8]>", "q_ptr": "*fp32"}
    kernel.cuLaunchKernel = lambda *given: 0
    tensors = [torch.zeros(2, 8)]
    launch = gpu.launch.Launch(kernel, (1,), tensors, [0], (), {}, tiles=([1, 8],))
    packed = gpu.launch.PackedArguments(kernel, launch, ())
    packed.launch([tensors[0].data_ptr()], None)
    packed.launch([64], None)
    packed.launch([tensors[0].data_ptr()], None)
    assert packed.pointers[0] == id(maps[0]) + gpu.launch.MAP_OFFSET
    packed.launch([64], None)
    assert packed.pointers[0] == id(maps[1]) + gpu.launch.MAP_OFFSET
    assert made == [(address, 3, 4, 7, [1, 8], [2, 8], [8, 1], 0) for address in (tensors[0].data_ptr(), 64)]
    shape = [ctypes.c_int32.from_address(packed.pointers[index]).value for index in (1, 2)]
    strides = [ctypes.c_int64.from_address(packed.pointers[index]).value for index in (3, 4)]
    assert (shape, strides) == ([2, 8], [8, 1])
    assert ctypes.c_uint64.from_address(packed.pointers[5]).value == 64
    for address in (128, 192, 256):
        packed.launch([address], None)
    assert len(packed.made) <= 3  # not more with every address


def test_unaligned_addresses_and_unknown_tritons_launch_by_triton(monkeypatch):
    tensors = [torch.zeros(2, 8) for _ in range(2)]
    assert len(repeat_launch(monkeypatch, [*tensors, torch.zeros(17)[1:].view(2, 8)]).by_triton) == 2
    monkeypatch.setattr(gpu.launch, "launch_obstacle", lambda: "changed")
    assert len(repeat_launch(monkeypatch, [*tensors, torch.zeros(2, 8)]).by_triton) == 2


@pytest.mark.parametrize("wants", ["global_scratch_size", "launch_cooperative_grid", "launch_pdl"])
def test_kernels_that_ask_for_more_launch_by_triton(monkeypatch, wants):
    monkeypatch.setattr(Metadata, wants, 1)
    assert len(repeat_launch(monkeypatch, [torch.zeros(2, 8) for _ in range(3)]).by_triton) == 2


def test_profilers_are_told_of_launches(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda *_: None])
    assert len(repeat_launch(monkeypatch, [torch.zeros(2, 8) for _ in range(3)]).by_triton) == 2


def test_an_error_of_the_driver_is_raised(monkeypatch):
    monkeypatch.setattr(Kernel, "cuLaunchKernel", lambda *_: 700)
    with pytest.raises(RuntimeError, match="the CUDA driver cannot launch kernel: error 700"):
        repeat_launch(monkeypatch, [torch.zeros(2, 8) for _ in range(3)])


def test_a_changed_interface_is_noticed(monkeypatch):
    monkeypatch.setattr(gpu.launch, "KNOWN_LINES", ("params.append(something_new)",))
    found = gpu.launch.launch_obstacle.__wrapped__()
    assert found.endswith("launches kernels in another way: no 'params.append(something_new)'")


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("meta", False)])
def test_tables_of_another_device_are_moved_before_every_call(device, known, monkeypatch):
    """As of a model whose layers are on several devices: a plan hands its kernels addresses, whatever they are of."""
    monkeypatch.setattr(attention_module, "is_readable", lambda table: False)
    q, k, v = inputs_of(SHORT)[:3]
    lengths = torch.ones(2, dtype=torch.long, device=device)
    assert (attention_module.shortcut_key((), {}, q, k, v, lengths) is not None) == known
