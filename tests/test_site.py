"""`make site`: every page builds without a broken link, needs no network, and reads as it does on GitHub."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import rectiformer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The HTML of every page, by the path of the page."""
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    return {path.relative_to(out).as_posix(): path.read_text(encoding="utf-8") for path in out.rglob("*.html")}


def test_every_page_is_there(pages):
    expected = {path.name.replace(".md", ".html") for path in (ROOT / "docs").glob("*.md")}
    expected |= {f"tutorials/{path.stem}.html" for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    assert expected | {"index.html"} <= pages.keys()
    assert "Attention without softmax" in pages["index.html"]


def test_nothing_is_loaded_from_elsewhere(pages):
    for name, page in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="([^"]*)"|<link[^>]*href="([^"]*)"', page)
        assert loaded
        assert not [each for each in loaded if "//" in "".join(each)], name


def test_lists_and_tables_are_lists_and_tables(pages):
    for name, page in pages.items():
        assert not re.findall(r"<p>(?:\||[-*] )[^\n]*", page), name
    assert pages["variants.html"].count("<td>") > 100


def test_the_reference_has_every_public_name(pages):
    text = unescape(pages["api.html"])
    assert [name for name in rectiformer.__all__ if not re.search(rf'id="rectiformer\.(\w+\.)*{name}"', text)] == []
    assert "The values that each query sees" in text
    assert "True where a query may see a key" in text


def test_links_of_pages_become_those_of_the_site():
    from site_hooks import CODE_OR_BRACKETS, LINK, change_link

    known = {"index.md", "variants.md", "tutorials/attention.md", "studies/a.md", "images/compare.png"}

    def changed(text, source="docs/variants.md", uri="variants.md"):
        return LINK.sub(lambda link: change_link(link, ROOT / source, uri, known), text)

    assert changed("[a](../README.md#install)") == "[a](index.md#install)"
    assert changed("[`base`](../configs/base.toml)") == "`base` (`configs/base.toml`)"
    assert changed("[configs/base.toml](../configs/base.toml)") == "`configs/base.toml`"
    assert changed("[a](missing.md) [b](https://arxiv.org)") == "[a](missing.md) [b](https://arxiv.org)"
    assert changed("[a](tutorials/a.ipynb)") == "[a](tutorials/a.ipynb)"  # there is none
    assert changed("[a](tutorials/attention.ipynb)") == "[a](tutorials/attention.md)"
    assert changed("![a](docs/images/compare.png)", "README.md", "index.md") == "![a](images/compare.png)"
    assert changed("[a](../variants.md)", "docs/studies/a.md", "studies/a.md") == "[a](../variants.md)"
    assert CODE_OR_BRACKETS.findall("`[a] [b]` [c] [d]") == ["`[a] [b]`", "]"]


def test_notebooks_become_pages_with_what_they_print_and_draw():
    from site_hooks import notebook_page

    def code(source, *outputs):
        return {"cell_type": "code", "source": source, "outputs": list(outputs)}

    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        code("print(1)\n2", {"name": "stdout", "text": ["1\n"]}, {"data": {"text/plain": "2"}}),
        code("%%sh\nls", {"data": {"image/png": "cG5n", "text/plain": "<Figure>"}}),
    ]
    text, images = notebook_page({"cells": cells}, "name")
    assert text.split("\n\n") == [
        "# Title\ntext",
        "```python\nprint(1)\n2\n```",
        "``` {.text .printed}\n1\n```",
        "``` {.text .printed}\n2\n```",
        "```sh\n%%sh\nls\n```",
        "![What the code above draws](name-1.png)\n",
    ]
    assert images == {"name-1.png": b"png"}


def test_a_tutorial_shows_its_drawings_and_links_to_pages(pages):
    page = pages["tutorials/attention.html"]
    assert '<img alt="What the code above draws" src="attention-1.png"' in page
    assert 'href="huggingface.html"' in page
    assert 'class="printed highlight"' in page
    assert '<a href="tutorials/attention.html">' in pages["index.html"]
