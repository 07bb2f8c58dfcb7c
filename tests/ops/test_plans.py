"""Launch plans: eager calls of one layout share one, and it never answers for a call that differs."""

import threading

import pytest
import torch
from closeness import assert_no_worse, grid_inputs

from rectiformer import attention
from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops import attention as attention_module
from rectiformer.ops import gpu
from rectiformer.ops.gpu import plans

pytestmark = pytest.mark.usefixtures("interpreter")
LONG, SHORT = (1, 2, 2, 70, 140, 8, 8), (2, 2, 2, 5, 7, 8, 8)


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    """Each test begins without plans."""
    monkeypatch.setattr(attention_module, "SHORTCUTS", plans.PlanCache())
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


@pytest.mark.parametrize("sizes", [(2, 4, 2, 5, 7, 8, 8), (1, 2, 2, 70, 140, 24, 8)], ids=["short", "long"])
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
    one_at_a_time, launch = threading.Lock(), gpu.launch.Launch.__call__

    def launch_alone(self, tensors):  # the interpreter is one for all threads
        with one_at_a_time:
            launch(self, tensors)

    monkeypatch.setattr(gpu.launch.Launch, "__call__", launch_alone)
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


class Recorder:
    """A compiled kernel that only notes what it is launched with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self):
        self.launches = []

    def run(self, *arguments):
        self.launches.append(arguments)


class Kernel:
    """As much of a JIT function as a launch uses."""

    arg_names = ("q", "k", "q_ptr", "k_ptr", "out_ptr", "strides", "count", "FLAG", "SIZE")

    def __init__(self):
        self.compiled, self.by_triton = Recorder(), []

    def __getitem__(self, grid):
        return lambda *arguments, **flags: self.by_triton.append((grid, arguments, flags)) or self.compiled


def repeat_launch(monkeypatch, tensors, tiles=(None, None)):
    """A launch made twice: the kernel that Triton launched, and what the compiled one got."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    kernel = Kernel()
    flags = {"SIZE": 16, "FLAG": True, "num_warps": 4}
    launch = gpu.launch.Launch(kernel, (3, 2), tensors, [0, 1, 2], ((8, 1), 5), flags, tiles)
    launch(tensors)
    launch(tensors)
    return kernel


def test_the_second_launch_goes_straight_to_the_compiled_kernel(monkeypatch):
    tensors = [torch.zeros(2, 8) for _ in range(3)]
    kernel = repeat_launch(monkeypatch, tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(kernel.by_triton) == 1
    (found,) = kernel.compiled.launches
    given = (*addresses[:2], *addresses, (8, 1), 5, True, 16)
    assert found == (3, 2, 1, 99, 7, (4, 1, 0), None, None, None, *given)


def test_descriptors_are_made_anew_for_each_address(monkeypatch):
    tensors = [torch.zeros(2, 8) for _ in range(3)]
    kernel = repeat_launch(monkeypatch, tensors, tiles=([1, 8], [2, 8]))
    described = kernel.compiled.launches[0][9:11]
    assert all(each.base is tensor for each, tensor in zip(described, tensors, strict=False))
    assert [(each.shape, each.strides, each.padding) for each in described] == [([2, 8], [8, 1], "zero")] * 2


def test_unaligned_addresses_and_unknown_tritons_launch_by_triton(monkeypatch):
    tensors = [torch.zeros(2, 8) for _ in range(2)]
    assert len(repeat_launch(monkeypatch, [*tensors, torch.zeros(17)[1:].view(2, 8)]).by_triton) == 2
    monkeypatch.setattr(gpu.launch, "launch_obstacle", lambda: "changed")
    assert len(repeat_launch(monkeypatch, [*tensors, torch.zeros(2, 8)]).by_triton) == 2


def test_profilers_are_told_of_launches(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda *_: None])
    assert len(repeat_launch(monkeypatch, [torch.zeros(2, 8) for _ in range(3)]).by_triton) == 2


def test_a_changed_interface_is_noticed(monkeypatch):
    from triton.backends.nvidia import driver

    def call(self, grid, stream, function, *args): ...

    monkeypatch.setattr(driver.CudaLauncher, "__call__", call)
    assert gpu.launch.launch_obstacle.__wrapped__() == "CudaLauncher takes self, grid, stream, function, args"
