"""Build the folder from which Hugging Face's `kernels` package loads rectiformer's attention: `make hub-kernel`.

    python tools/hub_kernel.py --out build/hub-kernel

    import kernels
    rectiformer = kernels.get_local_kernel("build/hub-kernel")
    rectiformer.attention(q, k, v, "rela", causal=True)

The files are those of the package, the attention functions and modules and all that they import, with three changes:
imports are relative, since a kernel is loaded from any path under any name; torch's operators get a namespace of their
own, so that several versions and the installed package live in one process; and `__init__.py` is made of the lines of
the package's own. Python and Triton need no build, so that each backend has the same files (`kernels` 0.16 and 0.17).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rectiformer"
PARTS = tuple(f"{PACKAGE}.{part}" for part in ("errors", "ops", "model.attention", "model.cache", "model.multihead"))
"""Modules and packages whose public names the kernel has."""
BACKENDS = ("cpu", "cuda")
VERSION = 1
"""Of the kernel: a whole number, which rises where a call that worked does not work any more."""
IMPORT = re.compile(rf"^(\s*)from {PACKAGE}((?:\.\w+)+) import ", re.MULTILINE)
OPERATORS = re.compile(rf'{PACKAGE}(?=::)|(?<=torch\.ops\.){PACKAGE}\b|(?<=Library\("){PACKAGE}(?=")')


def public_imports() -> list[ast.ImportFrom]:
    """The imports of the package's `__init__.py` that the kernel has too."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PARTS)]
    for node in found:
        node.names = [alias for alias in node.names if not alias.asname]  # what has another name is not public
    return [node for node in found if node.names]


def file_of(module: str) -> Path | None:
    """The file of a module, relative to the root; None if there is no such module."""
    path = Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if (ROOT / file).is_file()), None)


def needed_files(modules: list[str]) -> list[Path]:
    """The files of some modules and of all that they import, at once or when first needed, with their packages."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        file = file_of(module)
        if module == PACKAGE or file is None or file in found:
            continue
        found.add(file)
        waiting.append(module.rpartition(".")[0])
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                waiting += [node.module or "", *(f"{node.module}.{name}" for name in names)]
            elif any(name.partition(".")[0] == PACKAGE for name in names):
                raise SystemExit(f"{file}:{node.lineno}: write `from ... import`, which can be made relative")
    return sorted(found)


def rewrite(text: str, file: Path, namespace: str) -> str:
    """A file of the package as a file of the kernel."""
    up = "." * (len(file.parts) - 2)  # and the dot that the rest of the name begins with
    return OPERATORS.sub(namespace, IMPORT.sub(rf"\1from {up}\2 import ", text))


def write_init() -> str:
    lines = [f'"""Attention with the softmax replaced by a ReLU: {PACKAGE} as a kernel of the Hugging Face Hub."""', ""]
    names = []
    for node in public_imports():
        names += [alias.name for alias in node.names]
        lines.append(f"from {(node.module or '').removeprefix(PACKAGE)} import {', '.join(a.name for a in node.names)}")
    return "\n".join([*lines, "", "__all__ = [", *(f'    "{name}",' for name in sorted(names)), "]", ""])


def build(out: Path) -> Path:
    """Write the kernel to a new folder `out`, or over a kernel that is there."""
    if out.exists() and not (out / "build").is_dir():
        raise SystemExit(f"{out} exists and is not a kernel; name a new folder")
    shutil.rmtree(out, ignore_errors=True)
    files = needed_files([node.module or "" for node in public_imports()])
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    fingerprint = hashlib.sha256("\0".join(sources.values()).encode()).hexdigest()[:8]
    for backend in BACKENDS:
        namespace = f"_{PACKAGE}_{backend}_{fingerprint}"
        variant = out / "build" / f"torch-{backend}"
        for file, text in sources.items():
            target = variant / file.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewrite(text, file, namespace), encoding="utf-8")
        (variant / "model" / "__init__.py").touch()
        (variant / "__init__.py").write_text(write_init(), encoding="utf-8")
        metadata = {"id": namespace, "name": PACKAGE, "version": VERSION, "license": "Apache-2.0", "python-depends": []}
        text = json.dumps({**metadata, "backend": {"type": backend}}, indent=2)
        (variant / "metadata.json").write_text(text + "\n", encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/hub-kernel"), help="the folder to write")
    out = build(parser.parse_args().out)
    files = list(out.rglob("*.py"))
    print(
        f"{out}: {len(files)} files for {' and '.join(BACKENDS)}, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
