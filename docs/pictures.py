"""Take the pictures of docs/instrument.md again, from the models of `make demo`: python docs/pictures.py runs/demo

Needs playwright and Chromium. Everything shown is text of the built-in grammar.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
SENTENCE = "Wann wollen wir einer Ärztin ein Kleid geben?"
DEAD = "Das Radio hat dieser Bruder nicht repariert."  # a head of the encoder is null at all of its queries
ROW = 10  # the word of SENTENCE's translation at which all heads but one are null
ROWS = 122  # of the document that is shown
FIRST, HEAD = 24, 4


def rectiformer(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rectiformer", *arguments], check=True)


def take(page: Page, name: str, top: str, height: int, left: str = "#view", width: int = 1130) -> None:
    """Save what begins at the elements `top` and `left`, in 256 colors, rare ones among them."""
    y = page.locator(top).first.bounding_box()["y"] - 10
    x = max(0, page.locator(left).first.bounding_box()["x"] - 14)
    data = page.screenshot(clip={"x": x, "y": max(0, y), "width": width, "height": height})
    whole = Image.open(BytesIO(data)).convert("RGB")
    few = whole.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)


def look(page: Page, address: str, state: str) -> None:
    page.goto("about:blank")
    page.goto(f"{address}#{state}")
    page.wait_for_selector("body[data-ready]")


def take_report(page: Page, report: Path) -> None:
    """The pictures of the demo's own report."""
    address = f"file://{report.resolve()}"
    look(page, address, "layer=2&heads=1")
    take(page, "sentence", "#view", 790)
    look(page, address, "layer=2&edges=all")
    page.locator(".rows .unit").nth(ROW).hover()
    take(page, "null-query", ".stage", 640)
    look(page, address, "view=gold")
    take(page, "gold", ".stage", 520)
    look(page, address, "view=compare&scale=row&edges=all")
    take(page, "compare", ".pair", 592)


def take_document(page: Page, run: Path, folder: Path) -> None:
    rectiformer("data", "generate", str(folder / "doc"), "--documents", "40", "--split", "test")
    for side in ("de", "en"):
        lines = (folder / f"doc.{side}").read_text(encoding="utf-8").splitlines()[1:]
        documents = " ".join(lines).replace(" <d> ", "\n")
        (folder / f"docs.{side}").write_text(f"{documents}\n", encoding="utf-8")
    page_file = folder / "docs.html"
    files = ["--source", str(folder / "docs.de"), "--target", str(folder / "docs.en")]
    rectiformer("analyze", str(run), *files, "--report", str(page_file), "--examples", "40", "--sites", "cross")
    for example in range(40):
        state = f"unit=piece&layer=2&heads={HEAD}&first={FIRST - 1}&row={FIRST - 1}&example={example}"
        look(page, f"file://{page_file}", state)
        if f"of {ROWS}" in page.locator(".counts").inner_text():
            take(page, "document", "#view", 800)
            return
    raise SystemExit(f"no document has {ROWS} target pieces")


@contextmanager
def explorer(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rectiformer", "explore", str(run), "--no-browser", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split(" at ")[1].split(" ")[0]  # type: ignore[union-attr]
        finally:
            process.terminate()


def take_live(page: Page, run: Path) -> None:
    with explorer(run) as address:
        look(page, address, "layer=2")
        page.get_by_label("Source", exact=True).fill(SENTENCE)
        page.keyboard.press("Enter")
        page.wait_for_selector("svg [data-weight]")
        page.locator("[data-power='1']").click()
        page.wait_for_selector("[data-head-switch='1'][data-edges='0']")
        take(page, "live", "#top", 700, "#top", 1160)
        look(page, address, "view=heads")
        page.get_by_label("Source", exact=True).fill(DEAD)
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-head]")
        take(page, "dead-head", "#view", 370)


def main(folder: Path) -> None:
    browser: dict[str, Any] = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
    with sync_playwright() as playwright, TemporaryDirectory() as temporary:
        chromium = playwright.chromium.launch(**browser)
        page = chromium.new_page(viewport={"width": 1400, "height": 1100})
        take_report(page, folder / "report.html")
        take_document(page, folder / "rela-g", Path(temporary))
        page.set_viewport_size({"width": 1160, "height": 1100})
        take_live(page, folder / "rela-g")
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
