"""Set-up shared by all tests: one thread a worker, fixed seeds, GPU tests skipped where there is none."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from commands import run_main
from hypothesis import settings
from interpreter import INTERPRETED

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def interpreter(monkeypatch):
    """Fused kernels run on the CPU, by Triton's interpreter."""
    if not INTERPRETED:
        pytest.skip("needs Triton, and no GPU: there the kernels are tested compiled")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def rectiformer(monkeypatch, capfdbinary):
    """Calls a command in this process, with real standard streams: its exit code and what it wrote to each."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run_main(*arguments)
        out, err = capfdbinary.readouterr()
        return SimpleNamespace(code=code, out=out.decode(), err=err.decode())

    return call


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
