"""Eager calls on a GPU: the second call of a layout goes straight to the compiled kernels, and stays right."""

import threading

import pytest
import torch
from closeness import assert_no_worse, grid_inputs, outputs_and_gradients

from rectiformer import RectifiedAttention, attention, attention_varlen, decode_attention
from rectiformer.ops.gpu.launch import Launch, launch_obstacle

pytestmark = pytest.mark.gpu
SHAPES = {"short": (2, 4, 2, 100, 64), "long": (2, 4, 2, 300, 64), "wide": (1, 4, 4, 200, 128)}
FEATURES = [{}, {"causal": True}, {"variant": "relu2", "causal": True}, {"variant": "softmax"}]


def draw(shape, seed=0):
    B, H, K, N, D = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = (B, H, N, D), (B, K, N, D), (B, K, N, D)
    return [
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes
    ]


def results(inputs, upstream=None, **given):
    out = attention(*inputs, **given)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) if upstream is None else upstream)]


@pytest.fixture
def by_triton(monkeypatch):
    """The launches that went through Triton's own run."""
    launches, launch = [], Launch.launch_by_triton
    monkeypatch.setattr(Launch, "launch_by_triton", lambda self, *a: launches.append(self) or launch(self, *a))
    return launches


def test_tritons_private_interface_is_the_one_we_know():
    assert launch_obstacle() == ""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", FEATURES, ids=str)
def test_the_second_call_launches_directly_and_gives_the_same_bits(shape, given, by_triton):
    if given.get("variant") == "softmax" and shape != "short":
        pytest.skip("softmax of long rows is torch's own")
    B, H, K, N, D = SHAPES[shape]
    *leaves, upstream = (tensor.cuda() for tensor in grid_inputs(B, H, K, N, N, D, D))
    inputs = [leaf.bfloat16().requires_grad_() for leaf in leaves]
    first = results(inputs, upstream.bfloat16(), **given)
    by_triton.clear()
    for _ in range(3):
        again = results(inputs, upstream.bfloat16(), **given)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not by_triton
    given = {"variant": "rela", **given}
    exact, eager = (
        outputs_and_gradients([*leaves, upstream], dtype, how, **given)
        for dtype, how in ((torch.float64, "reference"), (torch.bfloat16, "eager"))
    )
    for (name, wanted), found in zip(exact.items(), first, strict=True):
        assert_no_worse(name, found, eager[name], wanted)


def test_other_numbers_of_the_same_layout_are_read_anew():
    one, other = draw(SHAPES["long"], 1), draw(SHAPES["long"], 2)
    kept = results(one)
    results(other)
    assert all(torch.equal(a, b) for a, b in zip(kept, results(one), strict=True))
    assert not torch.equal(kept[0], results(other)[0])


def test_calls_run_on_the_current_stream():
    inputs = draw(SHAPES["long"])
    expected = results(inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = attention(*inputs)
        assert not stream.query()  # it waits behind the pause, so it is on this stream
    stream.synchronize()
    assert torch.equal(late, expected[0])


def test_calls_can_be_captured():
    inputs = [tensor.detach() for tensor in draw(SHAPES["long"])]
    for _ in range(2):
        attention(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs)
    fresh = [tensor.detach() for tensor in draw(SHAPES["long"], 5)]
    for held, new in zip(inputs, fresh, strict=True):
        held.copy_(new)
    graph.replay()
    assert torch.equal(out, attention(*fresh))


def test_threads_share_plans():
    inputs = [[tensor.detach() for tensor in draw(shape)] for shape in SHAPES.values()]
    expected = [attention(*each) for each in inputs]
    wrong = []

    def work():
        for index in range(60):
            if not torch.equal(attention(*inputs[index % 3]), expected[index % 3]):
                wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients_of_gradients_stay():
    inputs = draw((1, 2, 2, 20, 32))
    seconds = []
    for backend in ("fused", "reference"):
        (first,) = torch.autograd.grad(
            attention(*inputs, "relu2", backend=backend).float().square().sum(), inputs[:1], create_graph=True
        )
        seconds.append(torch.autograd.grad(first.float().square().sum(), inputs))
    for fused, exact in zip(*seconds, strict=True):
        assert (fused - exact).abs().max() <= 5e-2 * exact.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_launch_directly(causal, by_triton):
    lengths = torch.tensor([3, 100, 0, 64, 17])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to("cuda", torch.int32)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(184, 4, 64, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )

    def run():
        out = attention_varlen(q, k, v, bounds, bounds, max_seqlen_q=128, max_seqlen_k=128, causal=causal)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    first = run()
    run()  # the first call that takes the short cut, whose gradients have other strides
    by_triton.clear()
    assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
    assert not by_triton
    alone = attention(*(x[3:103].transpose(0, 1)[None] for x in (q, k, v)), causal=causal)[0].transpose(0, 1)
    assert (first[0][3:103].float() - alone.float()).abs().max() <= 2e-2 * alone.float().abs().max()


def test_modules_and_decoding_launch_directly(by_triton):
    module = RectifiedAttention(256, 4).to("cuda", torch.bfloat16)
    x = torch.randn(4, 50, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (tensor.detach() for tensor in draw((2, 4, 2, 500, 64)))
    lengths = torch.tensor([500, 300], device="cuda")

    def run():
        (grad,) = torch.autograd.grad(module(x).float().sum(), x)
        return grad, decode_attention(q[:, :, :1], k, v, key_lengths=lengths)

    first = run()
    by_triton.clear()
    assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
    assert not by_triton


def test_generation_launches_directly_while_keys_grow(by_triton):
    q, k, v = (tensor.detach() for tensor in draw((2, 8, 2, 700, 64)))
    q = q[:, :, :1]
    for keys in range(300, 700):
        found = attention(q, k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous())
        if keys % 50 == 0:
            exact = attention(q.double(), k[:, :, :keys].double(), v[:, :, :keys].double(), backend="reference")
            eager = attention(q, k[:, :, :keys], v[:, :, :keys], backend="products")
            assert_no_worse(f"{keys} keys", found, eager, exact)
    assert len(by_triton) < 30  # not one per length
