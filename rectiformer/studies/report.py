"""One Markdown file about all studies in a folder: tables, figures, commands, and where the numbers come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rectiformer.errors import DataError
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import SCALES, Study
from rectiformer.studies.results import Results, distinct
from rectiformer.studies.running import load_results

LEGEND = """Intervals are 95 % t intervals over seeds. How what a paper says is known: [S] seen in a primary source,
[T] read in a third text, [D] derived, [R] recalled.
"""


def write_report(out: Path) -> Path:
    """Render every study of which something is known in `out` as OUT/report.md, its figures beside it."""
    found = list(studies_in(out))
    if not found:
        raise DataError(f"{out} holds no results of a study; `rectiformer study NAME --out {out}` makes some")
    parts = ["# Studies\n", LEGEND, *(render(study, results, out) for study, results in found)]
    path = out / "report.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def studies_in(out: Path) -> Iterator[tuple[Study, Results]]:
    """Every study and scale with results, in the order of the table of studies."""
    for study in STUDIES.values():
        for scale in SCALES:
            results = load_results(study, study.at(scale), out)
            if results.entries:
                yield study, results


def render(study: Study, results: Results, out: Path) -> str:
    """The section of a study at a scale."""
    lines = [f"## {study.title} (`{study.name}`, {results.scale})", "", study.question, "", f"Paper: {study.paper}", ""]
    lines += [describe_origin(results), "", "```sh", command(study, results.scale, out), "```", ""]
    for table in study.tables(results):
        lines += [table.to_markdown()]
    for path in study.figures(results, out / "figures" / f"{study.name}-{results.scale}"):
        lines += [f"![{path.stem}]({path.relative_to(out).as_posix()})", ""]
    lines += [f"- {entry.key} failed: `{entry.failed.replace('`', chr(39))}`" for entry in results.failures]
    return "\n".join(lines) + "\n"


def describe_origin(results: Results) -> str:
    """How much is done, and by what code on which machine."""
    entries = results.finished
    counts = f"{len(entries)} of {results.planned} trainings finished"
    if results.failures:
        counts += f", {len(results.failures)} failed"
    code = f"commit {distinct(entry.commit for entry in entries)}, torch {distinct(entry.torch for entry in entries)}"
    signed = [entry.signature for entry in entries if entry.signature]
    signature = f"; BLEU: {distinct(signed)}" if signed else ""
    return f"{counts}; {distinct(entry.device for entry in entries)}; {code}{signature}."


def command(study: Study, scale: str, out: Path) -> str:
    """What makes, or goes on with, these results."""
    return f"rectiformer study {study.name} --scale {scale} --out {shlex.quote(str(out))}"
