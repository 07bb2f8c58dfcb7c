"""`make hub-kernel`: the folder loads as a kernel of the Hugging Face Hub does, with or without the package.

The `kernels` package is not installed for `make test`: it brings a dozen others along. Where it is, it has a test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_loading import load

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import hub_kernel

import rectiformer

ALONE = """
import sys
from pathlib import Path
import torch
from hub_loading import load

sys.modules["rectiformer"] = None  # an import of it fails
kernel = load(Path(sys.argv[1]))
q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
for variant in kernel.VARIANTS:
    kernel.attention(q, k, v, variant).sum().backward()
kernel.RectifiedAttention(32, 4)(torch.randn(2, 9, 32), causal=True)
compiled = torch.compile(kernel.attention, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(q, k, v, "rela"), kernel.attention(q, k, v, "rela"))
print(*sorted(name for name in kernel.__all__ if hasattr(kernel, name)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hub_kernel.build(tmp_path_factory.mktemp("hub") / "kernel")


@pytest.fixture(scope="module")
def kernel(folder):
    return load(folder / "build" / "torch-cuda")


def inputs(D=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 17, D, generator=generator).requires_grad_() for _ in range(3)]


def results(attention, variant, **arguments):
    q, k, v = inputs()
    out = attention(q, k, v, variant, **arguments)
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v])]


def test_it_needs_no_package(folder):
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", ALONE, str(folder / "build" / "torch-cpu")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=settings)
    assert run.returncode == 0, run.stderr
    public = {node for each in hub_kernel.public_imports() for node in (alias.name for alias in each.names)}
    assert set(run.stdout.split()) == public <= set(rectiformer.__all__)
    assert {"attention", "explain", "RectifiedAttention", "MultiheadAttention", "VARIANTS"} <= public


@pytest.mark.parametrize("variant", ["softmax", "rela", "reluformer", "entmax15", "threshold-diff"])
def test_it_does_what_the_package_does(kernel, variant):
    for ours, theirs in zip(
        results(kernel.attention, variant, causal=True),
        results(rectiformer.attention, variant, causal=True),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_module_takes_the_weights_of_the_package(kernel):
    ours, theirs = kernel.RectifiedAttention(32, 4), rectiformer.RectifiedAttention(32, 4)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32)
    assert torch.equal(ours(x, causal=True), theirs(x, causal=True))
    assert not isinstance(ours, rectiformer.RectifiedAttention)


@pytest.mark.usefixtures("interpreter")
def test_its_kernels_run_next_to_those_of_the_package(kernel):
    for ours, theirs in zip(
        results(kernel.attention, "rela", backend="fused"),
        results(rectiformer.attention, "rela", backend="fused"),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert hasattr(getattr(torch.ops, kernel.__name__), "short")


def test_the_folder_is_written_again_but_over_nothing_else(folder, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="is not a kernel"):
        hub_kernel.build(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    hub_kernel.build(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} == before


def test_the_kernels_package_loads_it(folder):
    kernels = pytest.importorskip("kernels")
    module = kernels.get_local_kernel(folder)
    q, k, v = inputs()
    assert torch.equal(module.attention(q, k, v, "rela"), rectiformer.attention(q, k, v, "rela"))
    assert module.__name__.startswith("_rectiformer_")
