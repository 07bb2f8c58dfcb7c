"""Set-up shared by all tests: one thread a worker, fixed seeds, a browser, GPU tests skipped where there is none."""

import io
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run_main
from forking import Forks
from hypothesis import settings
from interpreter import INTERPRETED

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")
torch.set_num_threads(1)  # for fixtures of modules, which come before those of the first test


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


TINY = (
    "data.sentences=200", "data.valid_sentences=10", "vocabulary.size=200", "model.hidden_size=16", "model.num_heads=2",
    "model.encoder_layers=1", "model.decoder_layers=1", "model.ffn_size=16", "training.steps=2",
    "training.batch_tokens=300", "training.device=cpu", "validation.every=2", "validation.sentences=2",
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a model that has learned nothing, for tests of what commands do around it."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    settings = [part for setting in TINY for part in ("--set", setting)]
    assert run_main("train", "--out", folder, *settings) == 0
    return folder


@pytest.fixture(scope="session")
def python():
    """Runs `python ...` in the root of the repository: its exit code and what it printed. Keywords go to its
    environment."""
    root = Path(__file__).parent.parent
    env = {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": str(root)}
    with Forks("torch", "transformers", cwd=root, env=env) as forks:
        yield forks.run


@pytest.fixture(scope="session")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt install chromium")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Open an address in a page whose requests and errors are kept; each test ends with neither."""
    contexts, trouble = [], []

    def open_page(url, offline=True, ready=True, size=(1400, 1000), **options):
        viewport = dict(zip(("width", "height"), size, strict=True))
        contexts.append(browser.new_context(offline=offline, viewport=viewport, **options))
        page = contexts[-1].new_page()
        page.on(
            "console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        if offline:
            page.on("request", lambda request: None if harmless(request) else trouble.append(request.url))
        page.goto(url)
        if ready:
            page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def harmless(request):
    """The page itself, opened from disk, and data inside it: no request to anywhere else."""
    own = request.is_navigation_request() and request.url.startswith("file://")
    return own or request.url.startswith(("data:", "blob:"))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount ({mounted.stderr.strip()})")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)
