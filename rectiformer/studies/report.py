"""The report: one page of claims, and one page per study with its tables, figures, command and origins."""

import os
from collections.abc import Sequence
from pathlib import Path

from rectiformer.errors import DataError
from rectiformer.files import read_regular, replacing
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.claims import list_parts, render_claims
from rectiformer.studies.plan import SCALES, Study
from rectiformer.studies.results import CLAIM, RULE, Figure, Results, Table, distinct, save_results, saved_path
from rectiformer.studies.running import load_results

PAGE, PAGES = "reproduction.md", "studies"
COMMAND_FOLDER = "studies"
"""The folder that shown commands name, whatever it was called here."""
LONGEST_REMARKS = 2**16  # bytes
NOTHING = "No training is finished yet."
SEEDS = (
    "Numbers are means over seeds and their 95 % intervals; of two seeds, both numbers; unless a table says otherwise."
)
LINES = (
    "Lines go through the mean of the seeds; small dashes are single seeds, bars are intervals of three seeds or more."
)


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
    parts = ["# Reproduction"]
    for scale, results in found.items():
        parts += [f"## Scale `{scale}`"] if len(found) > 1 else []
        parts += [render_claims(results) if scale == "small" else summarize(results)]
    write(out / PAGE, parts)
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
    rows = [
        (f"{name}, {results.scale}", *row)
        for name, results in found.items()
        for table in (STUDIES[name].tables(results) if results.entries else [])
        if table.columns[0] == CLAIM
        for row in table.rows
    ]
    return Table("All claims", ("study", CLAIM, "paper", "ours", "verdict"), rows, (RULE,)).to_markdown()


def describe(study: Study) -> str:
    links = f"All claims: [reproduction](../{PAGE}). How studies are run and read: [studies](../studies.md)."
    return f"{study.question}\n\n**Paper.** {study.paper}\n\n{links}"


def render(study: Study, results: Results, out: Path, page: Path) -> str:
    """What a page says of one scale: what was found, then how."""
    parts = [f"## Results at scale `{results.scale}`"] if results.entries else []
    parts.append(count_trainings(results))
    remarks = saved_path(out, study.name, results.scale).with_suffix(".md")
    if remarks.exists():
        parts.append(read_regular(remarks, LONGEST_REMARKS).decode("utf-8"))
    if results.entries:
        figures = study.figures(results, out / "figures" / f"{study.name}-{results.scale}")
        if any(entry.seed != results.entries[0].seed for entry in results.entries):
            parts.append(f"{SEEDS} {LINES}" if figures else SEEDS)
        parts += [show(figure, page) for figure in figures]
        parts += [table.to_markdown() for table in study.tables(results) if table.rows]
    parts.append("\n".join(f"- {each.key} failed: `{each.failed.replace('`', chr(39))}`" for each in results.failures))
    parts += [describe_command(study, results.scale), describe_origin(results)]
    return "\n\n".join(part.strip("\n") for part in parts if part)


def show(figure: Figure, page: Path) -> str:
    path = Path(os.path.relpath(figure.path, page.parent)).as_posix()
    return f"**{figure.about}**\n\n![{figure.about}]({path})"


def count_trainings(results: Results) -> str:
    """How many trainings are finished."""
    if not results.entries:
        return f"{NOTHING} {results.planned} are planned."
    finished = len(results.finished)
    counts = f"{finished} of {results.planned} trainings are finished"
    if finished == results.planned:
        counts = "All trainings are finished"
    if results.failures:
        counts += f", {len(results.failures)} failed"
    if results.changed:
        counts += f" (with other settings than the study has now: {', '.join(results.changed)})"
    return f"{counts}."


def describe_command(study: Study, scale: str) -> str:
    """What trains and measures all models of a page, and the parts of it that claims need."""
    command = f"rectiformer study {study.sources} --scale {scale} --out {COMMAND_FOLDER}"
    parts = list_parts(study.name) if scale == "small" else {}
    lines = [f"- `--only {only}`: {about}" for only, about in parts.items()]
    only = ["To train only a part, add one of these:", "\n".join(lines)] if lines else []
    return "\n\n".join(["**Command**", f"```sh\n{command}\n```", *only])


def describe_origin(results: Results) -> str:
    """Which code made the results, on which machine, and how BLEU was counted."""
    entries = results.finished
    if not entries:
        return ""
    commits, versions, devices = (
        distinct(getattr(entry, name) for entry in entries) for name in ("commit", "torch", "device")
    )
    signed = [entry.signature for entry in entries if entry.signature]
    signature = f" BLEU: `{distinct(signed)}`." if signed else ""
    return f"Made on {devices} with torch {versions}, at commit {commits}.{signature}"
