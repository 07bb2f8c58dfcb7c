"""What `analyze` gives out: files, and a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rectiformer.analyze.findings import Findings, SiteFindings
    from rectiformer.analyze.record import AttentionRecord
    from rectiformer.terminal import Terminal


@dataclass(frozen=True)
class Outputs:
    """Files to write, those that were asked for."""

    report: Path | None
    figures: Path | None
    record: Path | None
    out: Path | None


def write_files(found: list[Findings], records: list[AttentionRecord], outputs: Outputs) -> list[Path]:
    """Write what was asked for; the paths."""
    from rectiformer.analyze.record import write_record

    contents = [each.to_json() for each in found]
    written: list[Path] = []
    for number, each in enumerate(found):
        if outputs.out:
            written.append(numbered(outputs.out, number))
            each.write(written[-1])
        if outputs.record:
            written.append(numbered(outputs.record, number))
            write_record(records[number], written[-1])
    if outputs.report:
        from rectiformer.analyze.report import write_report

        title = f"{' beside '.join(each.model.name for each in found)}: {found[0].data.name}"
        written.append(write_report(outputs.report, records, contents, title))
    if outputs.figures:
        from rectiformer.analyze.plots import write_figures

        write_figures(contents, records, outputs.figures)
        written.append(outputs.figures)
    return written


def numbered(path: Path, number: int) -> Path:
    """The file of run `number`, from 0: `a.json.gz`, then `a-2.json.gz`."""
    stem, dot, endings = path.name.partition(".")
    return path if number == 0 else path.with_name(f"{stem}-{number + 1}{dot}{endings}")


def print_findings(
    found: list[Findings], shows: Callable[[SiteFindings], bool], written: list[Path], as_json: bool
) -> None:
    """A row an attention, all heads of it together; as JSON, everything."""
    from rectiformer.analyze.record import KINDS
    from rectiformer.cli.writing import to_json, write_all
    from rectiformer.terminal import Terminal

    terminal = Terminal()
    if as_json:
        write_all(to_json(each.to_json()) for each in found)
    else:
        data = found[0].data
        within = f"{data.documents:,} documents, " if data.documents else ""
        terminal.note(f"{data.name}: {within}{data.sentences:,} sentences, {data.target_tokens:,} target subwords\n")
        columns = ["model", "attention", "layer", "zeros", "null rows", "dead heads", "diversity", "AER", "aligned by"]
        sites = [(each, site) for each in found for site in each.sites if shows(site)]
        sites.sort(key=lambda pair: (found.index(pair[0]), KINDS.index(pair[1].kind)))
        terminal.table(columns, [describe(*pair) for pair in sites], numbers=columns[2:8])
        print_distances(terminal, [(each, site.layer) for each, site in sites if site.kind == "cross"])
        scores = [f"{each.model.name} {each.quality.bleu:.1f}" for each in found if each.quality is not None]
        if scores and found[0].quality is not None:
            terminal.note(f"\nBLEU: {', '.join(scores)} ({found[0].quality.signature})")
    for path in written:
        Terminal(stderr=as_json).note(f"wrote {path}")


def describe(found: Findings, site: SiteFindings) -> list[str]:
    """What the table says of one attention; layers and heads count from 1."""
    from rectiformer.translate.align import ordinal

    dead = sum(rate == 1 for rate in site.null_rate)
    cells = [
        found.model.name,
        site.kind,
        ordinal(site.layer),
        f"{mean(site.sparsity):.1%}",
        f"{mean(site.null_rate):.1%}",
    ]
    cells += [f"{dead} of {site.heads}", f"{site.diversity.js:.3f}"]
    own = [row for row in found.alignment or () if row.layer == site.layer and site.kind == "cross"]
    if not own:
        return [*cells, "", ""]
    best = min(own, key=lambda row: row.aer)
    head = best.head if best.head == "average" else f"head {ordinal(best.head)}"
    return [*cells, f"{best.aer:.3f}", f"{head}, {best.induction}"]


def print_distances(terminal: Terminal, places: list[tuple[Findings, int]]) -> None:
    """Of documents, a row an attention to the source: how far it reaches."""
    columns = ["model", "segments", "layer", "aligned sentence", "neighbors", "farther", "between", "null rows"]
    rows = []
    for found, layer in places:
        for each in found.distances or ():
            if each.layer == layer:
                shares = (each.aligned, each.neighbors, each.farther, each.between, each.null_rate)
                cells = [found.model.name, f"{found.data.segments:,}", str(layer + 1)]
                rows.append([*cells, *(f"{share:.1%}" for share in shares)])
    if rows:
        terminal.note("\nwhere attention to the source goes (between: separators and the end)\n")
        terminal.table(columns, rows, numbers=columns[1:])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
