"""The report: one Markdown page about all studies in a folder, with tables, figures, commands and origins."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rectiformer.errors import DataError
from rectiformer.files import read_regular, replacing
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import SCALES, Study
from rectiformer.studies.results import CLAIM, RULE, Results, Table, distinct, save_results, saved_path
from rectiformer.studies.running import load_results

PAGE = "reproduction.md"
COMMAND_FOLDER = "studies"
"""The folder that shown commands name, whatever it was called here."""
LONGEST_REMARKS = 2**16  # bytes
LEGEND = """Intervals are 95 % t intervals over seeds. How we know what a paper says: [S] seen in a primary source,
[T] read in a secondary source, [D] derived, [R] recalled.
"""


def write_report(out: Path) -> Path:
    """Render every study with results in `out` as OUT/reproduction.md, with figures next to it.

    All results are saved in OUT/results too: a folder with nothing but these gives the same page. Remarks on a study
    are read from OUT/results/STUDY-SCALE.md.
    """
    found = list(studies_in(out))
    if not found:
        raise DataError(f"{out} holds no results of a study; `rectiformer study NAME --out {out}` makes some")
    for study, results in found:
        if study.shows is None:
            save_results(results, out)
    parts = ["# Reproduction\n", LEGEND, summarize(found), *(render(study, results, out) for study, results in found)]
    path = out / PAGE
    with replacing(path) as file:
        file.write("\n".join(parts).encode("utf-8"))
    return path


def summarize(found: Sequence[tuple[Study, Results]]) -> str:
    """Every claim of every study with its verdict."""
    rows: list[tuple[str, ...]] = []
    for study, results in found:
        for table in study.tables(results):
            if table.columns[0] == CLAIM:
                unit = table.columns[1].partition(", ")[2]
                rows += [(f"{study.name}, {results.scale}", row[0], unit, *row[1:]) for row in table.rows]
    return Table("All claims", ("study", CLAIM, "in", "paper", "ours", "verdict"), rows, (RULE,)).to_markdown()


def studies_in(out: Path) -> Iterator[tuple[Study, Results]]:
    """Every study and scale with results, in the order of the catalog."""
    for study in STUDIES.values():
        for scale in SCALES:
            results = load_results(study, study.at(scale), out)
            if results.entries:
                yield study, results


def render(study: Study, results: Results, out: Path) -> str:
    """The section of a study at a scale."""
    lines = [f"## {study.title} (`{study.name}`, {results.scale})", "", study.question, "", f"Paper: {study.paper}", ""]
    command = f"rectiformer study {study.source.name} --scale {results.scale} --out {COMMAND_FOLDER}"
    lines += [describe_origin(results), "", "```sh", command, "```", ""]
    remarks = saved_path(out, study.name, results.scale).with_suffix(".md")
    if remarks.exists():
        lines += [read_regular(remarks, LONGEST_REMARKS).decode("utf-8")]
    for table in study.tables(results):
        lines += [table.to_markdown()]
    for path in study.figures(results, out / "figures" / f"{study.name}-{results.scale}"):
        lines += [f"![{path.stem}]({path.relative_to(out).as_posix()})", ""]
    lines += [f"- {entry.key} failed: `{entry.failed.replace('`', chr(39))}`" for entry in results.failures]
    return "\n".join(lines) + "\n"


def describe_origin(results: Results) -> str:
    """How many trainings are finished, by which code, on which machine."""
    entries = results.finished
    counts = f"{len(entries)} of {results.planned} trainings finished"
    if results.failures:
        counts += f", {len(results.failures)} failed"
    if results.changed:
        counts += f" (with other settings than the study has now: {', '.join(results.changed)})"
    code = f"commit {distinct(entry.commit for entry in entries)}, torch {distinct(entry.torch for entry in entries)}"
    signed = [entry.signature for entry in entries if entry.signature]
    signature = f"; BLEU: {distinct(signed)}" if signed else ""
    return f"{counts}; {distinct(entry.device for entry in entries)}; {code}{signature}."
