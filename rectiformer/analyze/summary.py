"""Findings in a few lines: `analyze` prints them and its report shows the same words and digits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rectiformer.analyze.record import SITES
from rectiformer.translate.align import AVERAGE, ordinal

MEASURES = ("model", "attention", "layer", "zeros", "null rows", "dead heads", "diversity", "AER", "aligned by")
DISTANCES = ("model", "segments", "layer", "aligned sentence", "neighbors", "farther", "between", "null rows")
DISTANCES_TITLE = "where cross-attention goes (between: separators and the end)"

FindingsJson = Mapping[str, Any]
"""What `Findings.to_json` gives."""


@dataclass(frozen=True)
class Summary:
    """What is said of one or two models on a test set; an empty text or table is left out."""

    data: str
    measures: list[list[str]]
    """A row of `columns` per attention, all heads of it together."""
    distances: list[list[str]]
    """Of documents, a row of `DISTANCES` per cross-attention: how far it reaches."""
    bleu: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of `MEASURES` that `measures` has: without gold links none of links."""
        return MEASURES[: len(self.measures[0])] if self.measures else MEASURES

    def to_json(self) -> dict[str, Any]:
        """The summary with the names of its columns, as the page reads it."""
        columns = {"measure_columns": self.columns, "distance_columns": DISTANCES, "distances_title": DISTANCES_TITLE}
        return {**asdict(self), **columns}


def summarize(
    found: Sequence[FindingsJson], shows: Callable[[str, int], bool] = lambda kind, layer: True
) -> Summary | None:
    """What there is to say of one model, or two; None without findings.

    Args:
        shows: whether the attention of a kind and layer (from 0) is to be named.
    """
    if not found:
        return None
    sites = [
        (each, site)
        for each in found
        for site in sorted(each["sites"], key=lambda site: SITES.index(site["kind"]))
        if shows(site["kind"], site["layer"])
    ]
    cross = [(each, site["layer"]) for each, site in sites if site["kind"] == "cross"]
    measures, links = [describe_site(*pair) for pair in sites], MEASURES.index("AER")
    if not any(any(row[links:]) for row in measures):
        measures = [row[:links] for row in measures]
    return Summary(
        describe_data(found[0]["data"]),
        measures,
        [row for pair in cross for row in describe_distances(*pair)],
        describe_quality(found),
    )


def describe_data(data: Mapping[str, Any]) -> str:
    within = f"{data['documents']:,} documents, " if data.get("documents") else ""
    return f"{data['name']}: {within}{data['sentences']:,} sentences, {data['target_tokens']:,} target subwords"


def describe_site(found: FindingsJson, site: Mapping[str, Any]) -> list[str]:
    """A row of `MEASURES`. Layers and heads count from 1."""
    dead = sum(rate == 1 for rate in site["null_rate"])
    cells = [found["model"]["name"], site["kind"], ordinal(site["layer"])]
    cells += [f"{fmean(site['sparsity']):.1%}", f"{fmean(site['null_rate']):.1%}", f"{dead} of {site['heads']}"]
    cells.append(f"{site['diversity']['js']:.3f}")
    own = [row for row in found.get("alignment") or () if row["layer"] == site["layer"] and site["kind"] == "cross"]
    if not own:
        return [*cells, "", ""]
    best = min(own, key=lambda row: row["aer"])
    head = "mean of heads" if best["head"] == AVERAGE else f"head {ordinal(best['head'])}"
    return [*cells, f"{best['aer']:.3f}", f"{head}, {best['induction']}"]


def describe_distances(found: FindingsJson, layer: int) -> list[list[str]]:
    """Rows of `DISTANCES` of one layer; none where sentences are no documents."""
    shares = ("aligned", "neighbors", "farther", "between", "null_rate")
    cells = [found["model"]["name"], f"{found['data'].get('segments', 0):,}", ordinal(layer)]
    rows = [each for each in found.get("distances") or () if each["layer"] == layer]
    return [[*cells, *(f"{each[share]:.1%}" for share in shares)] for each in rows]


def describe_quality(found: Sequence[FindingsJson]) -> str:
    scores = [f"{each['model']['name']} {each['quality']['bleu']:.1f}" for each in found if each.get("quality")]
    quality = found[0].get("quality")
    return f"BLEU: {', '.join(scores)} ({quality['signature']})" if quality else ""
