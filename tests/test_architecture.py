"""The shape of the code itself: which part may import which, how long files grow, what an import costs."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rectiformer.errors import EXTRAS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rectiformer"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports point left only. Nothing imports a neighbor of its own rank.
LAYERS = [
    "errors interrupts",
    "web",
    "connections",
    "config ops files measure",
    "toml text model",
    "distributed",
    "runs",
    "translate",
    "integrations",
    "train analyze",
    "serve",
    "studies",
    "terminal",
    "demo",
    "cli",
    "__main__",
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts.split()}
INSIDE_OPS = [
    "shapes simplex dropout",
    "activations",
    "variants",
    "call",
    "reference",
    "autograd gpu",
    "cpu plain norm",
    "attention",
    "weights varlen decode distributed",
]
RANK_IN_OPS = {name: rank for rank, names in enumerate(INSIDE_OPS) for name in names.split()}
INSIDE_GPU = [
    "plans pointwise",
    "launch",
    "common",
    "short long simplex norm cosine row_functions decode_tiles",
    "long_backward decode rowwise",
    "cached_products rowwise_backward",
]
"""Files that are loaded when first needed: of them `gpu` itself imports `plans` alone, and they all may import it."""
RANK_IN_GPU = {name: rank for rank, names in enumerate(INSIDE_GPU) for name in names.split()}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    inside = [module[1] for module in imported_modules(path) if module[0] == "rectiformer" and len(module) > 1]
    upward = {other for other in inside if other != part and RANK[other] >= RANK[part]}
    assert not upward, f"{part} may not import {sorted(upward)}: the order is {' < '.join(LAYERS)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_imports_inside_ops_point_one_way(path):
    inside = [
        module[2] for module in imported_modules(path) if module[:2] == ["rectiformer", "ops"] and len(module) > 2
    ]
    upward = {other for other in inside if RANK_IN_OPS[other] >= RANK_IN_OPS[path.stem]}
    assert not upward, f"ops/{path.stem} may not import {sorted(upward)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops" / "gpu").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_imports_of_kernels_point_one_way(path):
    modules = [
        node.module.split(".")
        for node in ast.parse(path.read_text(encoding="utf-8")).body  # not those inside functions
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rectiformer.ops.")
    ]
    upward = {module[3] for module in modules if module[2] == "gpu" and len(module) > 3}
    upward = {other for other in upward if RANK_IN_GPU[other] >= RANK_IN_GPU[path.stem]}
    upward |= {module[2] for module in modules if RANK_IN_OPS[module[2]] >= RANK_IN_OPS["attention"]}
    assert not upward, f"ops/gpu/{path.stem} may not import {sorted(upward)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    cap = 700 if "gpu" in path.relative_to(PACKAGE).parts else 500  # kernels stand with their launchers
    assert text.count("\n") <= cap, "a file has one subject; split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node, clean=False) or "").count("\n") + 1
            assert node.end_lineno - node.lineno + 1 - docstring <= 60, f"{node.name} does not fit a screen"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_importing_the_package_is_light():
    heavy = ["matplotlib", "sentencepiece", "typer", "rich", "triton", "sacrebleu", "entmax", "fastapi", "transformers"]
    loaded = run_python(f"import sys, rectiformer; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


WITHOUT_EXTRAS = """
import sys
from rectiformer.errors import EXTRAS
sys.modules.update(dict.fromkeys([package for packages in EXTRAS.values() for package in packages]))
import torch, rectiformer
q = torch.randn(1, 2, 3, 4)
layer = rectiformer.RectifiedAttention(8, 2)
with rectiformer.observe(layer):
    layer(torch.randn(1, 3, 8))
print(tuple(rectiformer.attention(q, q, q).shape))
from rectiformer.__main__ import start
start()
"""


def test_the_core_needs_torch_and_numpy_alone():
    found = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, cwd=ROOT)
    line = "rectiformer: typer is not installed; pip install 'rectiformer[translate]'\n"
    assert (found.returncode, found.stdout, found.stderr) == (1, "(1, 2, 3, 4)\n", line)


def test_extras_of_messages_are_those_of_the_package():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra: {re.split(r"[>=\[]", each)[0].replace("-", "_") for each in found[extra]} for extra in EXTRAS}
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: packages - {"rectiformer"} | ({"pydantic"} if extra == "serve" else set())
        for extra, packages in named.items()
    }


def test_public_names_are_those_exported():
    import rectiformer

    assert all(hasattr(rectiformer, name) for name in rectiformer.__all__)
    found = {
        name
        for name, value in vars(rectiformer).items()
        if not name.startswith("_") and not hasattr(value, "__path__") and type(value).__name__ != "module"
    }
    assert set(rectiformer.__all__) == found | set(rectiformer._ON_DEMAND)


def test_no_machine_or_data_is_in_the_tree():
    """No pickle, no absolute paths of some machine, no corpus files."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text
        assert not re.search(r"/(home|root)/", text)
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not [name for name in tracked if name.endswith((".xz", ".gz", ".pt", ".bin", ".safetensors"))]
