"""Tables of a study: ours beside the paper's, and whether both say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rectiformer.studies.results import Estimate, Results, difference, estimate


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    """Lines below it."""

    def to_markdown(self) -> str:
        """A title, a table, its notes."""
        lines = [f"**{self.title}**", "", row_of(self.columns), row_of("---" for _ in self.columns)]
        lines += [row_of(row) for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"


def describe_all(values: Iterable[Sequence[float]], digits: int) -> list[str]:
    """A cell for each list of values of all seeds: mean and interval, or nothing."""
    return ["" if (found := estimate(each)) is None else found.describe(digits) for each in values]


def row_of(cells: Iterable[str]) -> str:
    """A line of a Markdown table; what would end a cell is escaped."""
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@dataclass(frozen=True)
class Claim:
    """A difference that the paper reports, and what would count as the same here."""

    first: str
    second: str
    """Rows of the study: how `first` stands to `second`."""
    expected: Literal["above", "below", "equal", "no worse"]
    paper: str
    """Its difference, if known, with the confidence of what we know about it."""
    margin: float = 0.5
    """How far apart equal may be, or below what is no worse."""

    def describe(self) -> str:
        """`relu above softmax`."""
        if self.expected == "equal":
            return f"{self.first} equal to {self.second}, within {self.margin:g}"
        if self.expected == "no worse":
            return f"{self.first} no more than {self.margin:g} below {self.second}"
        return f"{self.first} {self.expected} {self.second}"


CLAIM = "claim"
"""The first column of a table of claims."""
RULE = (
    'Agree: the 95 % interval of our difference over seeds (paired) lies on the paper\'s side of 0; for "equal", '
    'within the margin, for "no more below" above it. Disagree: it lies on the other side. Open: neither.'
)


def verdict(found: Estimate | None, claim: Claim) -> str:
    """agree, disagree or open, by the interval alone."""
    if found is None:
        return "not measured"
    if found.half is None:
        return "open (one seed)"
    low, high = found.mean - found.half, found.mean + found.half
    if claim.expected == "below":
        low, high = -high, -low
    if claim.expected == "equal":
        agree, disagree = -claim.margin <= low and high <= claim.margin, low > claim.margin or high < -claim.margin
    else:
        least = -claim.margin if claim.expected == "no worse" else 0.0
        agree, disagree = low > least, high < least
    return "agree" if agree else "disagree" if disagree else "open"


def claims_table(title: str, claims: Sequence[Claim], results: Results, measure: str, unit: str) -> Table:
    """Every claim whose rows are in the results, with our difference and the verdict."""
    rows = []
    for claim in claims:
        if not {claim.first, claim.second} <= set(results.names()):
            continue
        found = difference(results.by_seed(claim.first, measure), results.by_seed(claim.second, measure))
        shown = "" if found is None else signed(found)
        rows.append((claim.describe(), claim.paper, shown, verdict(found, claim)))
    return Table(title, (CLAIM, f"paper, {unit}", f"ours, {unit}", "verdict"), rows)


def signed(found: Estimate, digits: int = 2) -> str:
    """A difference, with its sign."""
    text = found.describe(digits)
    return text if text.startswith("-") else f"+{text}"
