"""One self-contained HTML file about one or two models: it opens from disk and needs no network.

The page is that of the explorer, in rectiformer/analyze/page. There its modules are files; here they become one
script, each in a scope of its own, that the page's policy allows by its hash. Texts are data, never markup.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rectiformer.analyze.record import SITES, AttentionRecord, pack, to_json
from rectiformer.analyze.summary import summarize
from rectiformer.errors import ArgumentError
from rectiformer.files import replacing

PAGE = Path(__file__).parent / "page"
BUDGET = 20_000_000
"""Most bytes of data in a page."""
KEPT_BITS = 12
"""Significant bits of a weight, of 24, if a record would not fit otherwise."""

POLICY = re.compile(r'(<meta http-equiv="Content-Security-Policy" content=")[^"]*"')
TITLE = re.compile("<title>.*?</title>")
ICON = '<link rel="icon" href="data:,">\n'
"""No icon: a browser asks a server for one otherwise."""
STYLE = re.compile('<link rel="stylesheet" href="([a-z]+[.]css)">')
DATA = re.compile('(<script type="application/json" id="page-data">).*?(</script>)')
SCRIPT = re.compile('<script type="module" src="([a-z]+)[.]js"></script>')
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z]+)[.]js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)


def report_html(
    records: Sequence[AttentionRecord], findings: Sequence[Mapping[str, Any] | None] | None = None, title: str = ""
) -> str:
    """The report as one HTML page.

    Args:
        records: one model, or two to compare: their examples are shown side by side, in order.
        findings: what `Findings.to_json` gives for each record, or None where a model has none.
        title: of the page.
    """
    if not 1 <= len(records) <= 2:
        raise ArgumentError(f"{len(records)} records for one report; give 1, or 2 to compare them")
    if findings is not None and len(findings) != len(records):
        raise ArgumentError(
            f"{len(findings)} findings for {len(records)} records; give one for each, None where there are none"
        )
    contents, notes = within_budget(records)
    found = list(findings or [None] * len(records))
    summary = summarize([each for each in found if each])
    data = {
        "title": title,
        "records": contents,
        "findings": found,
        "summary": summary and summary.to_json(),
        "left_out": notes,
    }
    return inline(fill((PAGE / "index.html").read_text(encoding="utf-8"), data, title))


def write_report(
    path: str | Path,
    records: Sequence[AttentionRecord],
    findings: Sequence[Mapping[str, Any] | None] | None = None,
    title: str = "",
) -> Path:
    """Write the page of `report_html` and return its path; an old file stays until the new one is complete."""
    path = Path(path)
    page = report_html(records, findings, title).encode("utf-8")
    with replacing(path) as file:
        file.write(page)
    return path


def live_html(
    models: Sequence[str], languages: Sequence[str] = ("", ""), examples: Sequence[tuple[str, str]] = ()
) -> str:
    """The page as a server gives it: it loads modules from there and calls api/translate.

    Args:
        models: their names, one or two.
        languages: codes of what they translate from and to, such as "de" and "en"; "" if not known.
        examples: (source, reference) pairs to choose from.
    """
    data = {"live": True, "models": list(models), "languages": list(languages), "examples": list(examples)}
    return fill((PAGE / "index.html").read_text(encoding="utf-8"), data, "")


def fill(page: str, data: dict[str, Any], title: str) -> str:
    """The page with its data, as JSON in which nothing can end the script element."""
    page = TITLE.sub(lambda _: f"<title>{html.escape(title or 'rectiformer')}</title>", page, count=1)
    return DATA.sub(lambda found: found[1] + embed(data) + found[2], page, count=1)


def embed(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def inline(page: str) -> str:
    """The page with style and modules inlined, and a policy that allows only those."""
    style = (PAGE / STYLE.search(page)[1]).read_text(encoding="utf-8")  # type: ignore[index]
    script = bundle(SCRIPT.search(page)[1])  # type: ignore[index]
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = POLICY.sub(lambda found: f'{found[1]}{policy}"', page, count=1)
    page = page.replace(ICON, "", 1)
    page = STYLE.sub(lambda _: f"<style>{style}</style>", page, count=1)
    return SCRIPT.sub(lambda _: f"<script>{script}</script>", page, count=1)


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(entry: str) -> str:
    """The module `entry` and all it imports as one script: each a function that returns what the module exports."""
    parts = [f"const ${name} = (() => {{\n{body}\n}})();" for name, body in ordered_modules(entry, {}).items()]
    return '"use strict";\n' + "\n".join(parts)


def ordered_modules(name: str, done: dict[str, str]) -> dict[str, str]:
    """Bodies of functions for a module and those it imports, imported ones first."""
    text = (PAGE / f"{name}.js").read_text(encoding="utf-8")
    for found in IMPORT.finditer(text):
        if found[2] not in done:
            ordered_modules(found[2], done)
    exported = EXPORT.findall(text)
    body = EXPORT.sub("", IMPORT.sub(r"const \1 = $\2;", text))
    done[name] = f"{body}return {{ {', '.join(exported)} }};"
    return done


def within_budget(records: Sequence[AttentionRecord]) -> tuple[list[dict[str, Any]], list[str]]:
    """Records as JSON that fit `BUDGET` together, and notes on what was left out for that."""
    contents = [to_json(record) for record in records]
    if size(contents) <= BUDGET:
        return contents, []
    for record, content in zip(records, contents, strict=True):
        for example, packed in zip(record.examples, content["examples"], strict=True):
            for site, packed_site in zip(example.sites, packed["sites"], strict=True):
                packed_site["weights"] = pack(cut_weights(site.weights), "f4")
    notes = [f"To keep this file small, weights are cut to {KEPT_BITS} significant bits: less than 0.05 % off."]
    if size(contents) > BUDGET:
        notes += leave_out(contents)
    return contents, notes


def size(value: Any) -> int:
    return len(embed(value))


def cut_weights(weights: np.ndarray) -> np.ndarray:
    """Weights rounded toward 0 to fewer bits; none becomes 0."""
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    cut = (bits >> (24 - KEPT_BITS) << (24 - KEPT_BITS)).view(np.float32)
    return np.where(cut == 0, weights, cut)


def leave_out(contents: list[dict[str, Any]]) -> list[str]:
    """Remove examples and sites from `contents` until they fit; return notes on which."""
    kept, left = 0, BUDGET  # the texts of the examples, at least one, may take half of the budget
    for column in zip_longest(*(content["examples"] for content in contents)):
        texts = sum(size({**example, "sites": []}) for example in column if example)
        if kept and left - texts < BUDGET // 2:
            break
        kept, left = kept + 1, left - texts
    most = max(len(content["examples"]) for content in contents)
    for content in contents:
        del content["examples"][kept:]
    notes = [f"the examples after {kept}, of {most}"] if kept < most else []
    notes += leave_out_sites(contents, left)
    return [f"Left out to keep this file below {BUDGET / 1e6:g} MB: {note}." for note in notes]


def leave_out_sites(contents: list[dict[str, Any]], left: int) -> list[str]:
    """Keep the sites that fit, cross-attention and first examples first; one note per site cut."""
    dropped: dict[str, set[int]] = {kind: set() for kind in SITES}
    candidates = [
        (number, site, example["sites"])
        for content in contents
        for number, example in enumerate(content["examples"], 1)
        for site in example["sites"]
    ]
    candidates.sort(key=lambda each: (SITES.index(each[1]["kind"]), each[0], each[1]["layer"]))
    for number, site, sites in candidates:
        if size(site) <= left:
            left -= size(site)
        else:
            sites.remove(site)
            dropped[site["kind"]].add(number)
    return [
        f"layers of the {kind} attention of {'examples' if len(numbers) > 1 else 'example'} {ranges(sorted(numbers))}"
        for kind, numbers in dropped.items()
        if numbers
    ]


def ranges(numbers: Sequence[int]) -> str:
    """1, 3-5"""
    starts = [number for number in numbers if number - 1 not in numbers]
    stops = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
