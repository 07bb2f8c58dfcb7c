"""The report: one page of claims, and one page per study with its tables, figures, command and origins."""

import os
from collections.abc import Sequence
from pathlib import Path

from rectiformer.errors import DataError
from rectiformer.files import read_regular, replacing
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.claims import render_claims
from rectiformer.studies.plan import SCALES, Study
from rectiformer.studies.results import CLAIM, RULE, Results, Table, distinct, save_results, saved_path
from rectiformer.studies.running import load_results

PAGE, PAGES = "reproduction.md", "studies"
COMMAND_FOLDER = "studies"
"""The folder that shown commands name, whatever it was called here."""
LONGEST_REMARKS = 2**16  # bytes
LEGEND = """Which claims of ReLA (Zhang et al. 2021) and ReLUFormer (Shen et al. 2023) hold in our trainings.
`rectiformer study report docs` makes this page from docs/results; [studies](studies.md) says how to run them."""
READING = """## How to read the tables

- *ours*: the difference of the two sides, paired over seeds, with its 95 % t interval; then the mean of each side
  over the seeds that both have, with their number in brackets.
- *verdict*: agree, if the interval lies where the claim asks for it; disagree, if it lies on the other side; open, if
  neither, or if seeds are missing.
- *command*: the study's name and its options. The whole command is `rectiformer study NAME OPTIONS --scale small
  --out studies --data DIR`.
- *paper*: where the number is from: [S] the authors' paper, figures or code, [T] another text about them, [D] derived,
  [R] recalled from memory, not checked ([R+] with high, [R-] with low confidence).
"""
NOTHING = "No training is finished yet."


def write_report(out: Path) -> Path:
    """Write OUT/reproduction.md, the claims and their verdicts, and OUT/studies/STUDY.md, one page per study.

    All results are saved in OUT/results too: a folder with nothing but these gives the same pages. Remarks on a study
    are read from OUT/results/STUDY-SCALE.md.
    """
    found = {scale: results_at(scale, out) for scale in SCALES}
    found = {scale: results for scale, results in found.items() if any(each.entries for each in results.values())}
    if not found:
        raise DataError(f"{out} holds no results of a study; `rectiformer study NAME --out {out}` makes some")
    for scale, results in found.items():
        for name, own in results.items():
            if STUDIES[name].trains and (own.entries or saved_path(out, name, scale).exists()):
                save_results(own, out)
    parts = ["# Reproduction", LEGEND]
    for scale, results in found.items():
        parts += [f"## Scale `{scale}`"] if len(found) > 1 else []
        parts += [render_claims(results) if scale == "small" else summarize(results)]
    write(out / PAGE, [*parts, READING])
    for study in STUDIES.values():
        page = out / PAGES / f"{study.name}.md"
        sections = [render(study, results[study.name], out, page) for results in found.values()]
        write(page, [f"# {study.title}", describe(study), *sections])
    return out / PAGE


def results_at(scale: str, out: Path) -> dict[str, Results]:
    """The results of every study at a scale, in the order of the catalog."""
    return {study.name: load_results(study, study.at(scale), out) for study in STUDIES.values()}


def write(path: Path, parts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write("\n\n".join(part.strip("\n") for part in parts if part).encode("utf-8") + b"\n")


def summarize(found: dict[str, Results]) -> str:
    """Every claim of every study with its verdict."""
    rows: list[tuple[str, ...]] = []
    for name, results in found.items():
        for table in STUDIES[name].tables(results) if results.entries else []:
            if table.columns[0] == CLAIM:
                unit = table.columns[1].partition(", ")[2]
                rows += [(f"{name}, {results.scale}", row[0], unit, *row[1:]) for row in table.rows]
    return Table("All claims", ("study", CLAIM, "in", "paper", "ours", "verdict"), rows, (RULE,)).to_markdown()


def describe(study: Study) -> str:
    links = f"All claims: [reproduction](../{PAGE}). How to run studies: [studies](../studies.md)."
    return f"{study.question}\n\nPaper: {study.paper}\n\n{links}"


def render(study: Study, results: Results, out: Path, page: Path) -> str:
    """What a page says of one scale."""
    command = f"rectiformer study {study.sources} --scale {results.scale} --out {COMMAND_FOLDER}"
    lines = [f"## Scale `{results.scale}`", "", describe_origin(results), "", "```sh", command, "```", ""]
    remarks = saved_path(out, study.name, results.scale).with_suffix(".md")
    if remarks.exists():
        lines += [read_regular(remarks, LONGEST_REMARKS).decode("utf-8")]
    if results.entries:
        for path in study.figures(results, out / "figures" / f"{study.name}-{results.scale}"):
            lines += [f"![{path.stem}]({Path(os.path.relpath(path, page.parent)).as_posix()})", ""]
        lines += [table.to_markdown() for table in study.tables(results) if table.rows]
    lines += [f"- {entry.key} failed: `{entry.failed.replace('`', chr(39))}`" for entry in results.failures]
    return "\n".join(lines)


def describe_origin(results: Results) -> str:
    """How many trainings are finished, by which code, on which machine."""
    entries = results.finished
    if not results.entries:
        return f"{NOTHING} {results.planned} are planned."
    counts = f"{len(entries)} of {results.planned} trainings finished"
    if results.failures:
        counts += f", {len(results.failures)} failed"
    if results.changed:
        counts += f" (with other settings than the study has now: {', '.join(results.changed)})"
    code = f"commit {distinct(entry.commit for entry in entries)}, torch {distinct(entry.torch for entry in entries)}"
    signed = [entry.signature for entry in entries if entry.signature]
    signature = f"; BLEU: {distinct(signed)}" if signed else ""
    return f"{counts}; {distinct(entry.device for entry in entries)}; {code}{signature}."
