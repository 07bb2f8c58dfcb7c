"""The demonstration as one page that needs no script, no network and no other file."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
:root { color-scheme: light dark }
table { border-collapse: collapse; margin: .7rem 0 }
th, td { padding: .15rem .5rem; text-align: left; font-weight: normal }
thead th { border-bottom: 1px solid } .map td { min-width: 2.6rem; text-align: center; border: 1px solid #8884 }
.map thead th { writing-mode: vertical-rl; border: 0 } .gold { outline: 2px solid #d60; outline-offset: -2px }
.null { font-style: italic; color: #07a } .pair { display: flex; flex-wrap: wrap; gap: 2.5rem }
"""


@dataclass(frozen=True)
class Example:
    """One model's attention to the source while it writes a given translation, word by word."""

    model: str
    translation: str
    """What the model itself makes of the source."""
    source_words: list[str]
    target_words: list[str]
    weights: np.ndarray  # [target words, source words]
    gold: set[tuple[int, int]]  # (source, target)


def write_page(path: Path, table: tuple[tuple[str, ...], list[tuple[str, ...]]], examples: list[list[Example]]) -> Path:
    """Write the page and return its path."""
    columns, rows = table
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    sections = "".join(section(models) for models in examples)
    path.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<meta name='viewport' content='width=device-width'><title>rectiformer demo</title><style>{STYLE}</style>"
        "<h1>What the heads look at</h1><p>Two translators learned the same grammar; all sentences here were unseen. "
        "A map shows attention to the source at the layer and head that align best: a row a word that is written, a "
        "column a word of the source. White is exactly zero, numbers are raw weights, orange frames are gold links, "
        "and <span class='null'>nothing</span> marks a row without any weight.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{sections}</html>",
        encoding="utf-8",
    )
    return path


def section(models: list[Example]) -> str:
    source = " ".join(models[0].source_words)
    maps = "".join(
        f"<div><h3>{escape(each.model)}: {escape(each.translation)}</h3>{weight_map(each)}</div>" for each in models
    )
    return f"<h2>{escape(source)}</h2><div class='pair'>{maps}</div>"


def weight_map(example: Example) -> str:
    """Weights as a table: darker is more, relative to the largest of the map."""
    most = float(example.weights.max()) or 1.0
    head = "".join(f"<th>{escape(word)}</th>" for word in example.source_words)
    rows = []
    for j, word in enumerate(example.target_words):
        cells = "".join(cell(example, i, j, most) for i in range(len(example.source_words)))
        note = "" if example.weights[j].any() else "<td class='null'>nothing</td>"
        rows.append(f"<tr><th>{escape(word)}</th>{cells}{note}</tr>")
    return f"<table class='map'><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def cell(example: Example, i: int, j: int, most: float) -> str:
    weight = float(example.weights[j, i])
    gold = " class='gold'" if (i, j) in example.gold else ""
    if weight == 0:
        return f"<td{gold}></td>"
    strength = min(1.0, abs(weight) / most)
    return f"<td{gold} style='background: rgb(0 119 170 / {strength:.2f})'>{weight:.2f}</td>"
