"""Results on disk, their statistics over seeds, and tables of them with the verdicts on the papers' claims."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from rectiformer.errors import DataError
from rectiformer.files import parse_object, read_regular, replace_file

FORMAT = 1
RESULT, FAILURE = "result.json", "failed.json"
SAVED = "results"
"""The folder of saved results: STUDY-SCALE.jsonl, one result per line, small enough to keep with the code."""
LARGEST = 2**24  # bytes of a result; ours have a few thousand
LARGEST_SAVED = 2**28


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training, finished or failed, and where its numbers come from."""

    study: str
    scale: str
    key: str
    name: str
    seed: int
    labels: dict[str, Any]
    config: str
    """Hash of the configuration, without the folders of files and the device."""
    data: str = ""
    """Hash of the prepared data."""
    commit: str = ""
    device: str = ""
    torch: str = ""
    rectiformer: str = ""
    seconds: float = 0.0
    """Wall time of the process that finished the training, from its start or its last resume."""
    signature: str = ""
    """sacreBLEU's."""
    measures: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    """Why it failed, in one line; empty where it did not."""

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Save it in `folder`, whole or not at all; a failure never replaces a result."""
        content = self.to_json(indent=1).encode()
        replace_file(folder / (FAILURE if self.failed else RESULT), content + b"\n")
        if not self.failed:
            (folder / FAILURE).unlink(missing_ok=True)


def read_result(folder: Path) -> Result | None:
    """The result of the training in `folder`, else its failure, else None."""
    for name in (RESULT, FAILURE):
        path = folder / name
        if path.exists():
            return parse_result(path, read_regular(path, LARGEST))
    return None


def parse_result(path: Path, text: bytes) -> Result:
    """The result in a file or in one line of it; DataError where there is none."""
    content = parse_object(path, text)
    found = content.pop("format", None)
    if found != FORMAT:
        raise DataError(f"{path} has format {found!r}, this rectiformer reads {FORMAT}; remove it to run it again")
    try:
        return Result(**content)
    except TypeError as error:
        raise DataError(f"{path} is no result of a study ({error}); remove it to run it again") from error


def save_results(results: Results, out: Path) -> None:
    """Save a study's own results as one file of lines, which `read_saved` reads, without folders of this machine.

    What was saved there before and is not planned any longer stays, after the others.
    """
    path = saved_path(out, results.study, results.scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {entry.key: entry for entry in results.entries if entry.study == results.study}
    entries = [
        *own.values(),
        *(old for key, old in read_saved(out, results.study, results.scale).items() if key not in own),
    ]
    portable = [replace(entry, failed=entry.failed.replace(str(out), "OUT")) for entry in entries]
    replace_file(path, "".join(f"{entry.to_json()}\n" for entry in portable).encode())


def read_saved(out: Path, study: str, scale: str) -> dict[str, Result]:
    """The saved results of a study at a scale, by key."""
    path = saved_path(out, study, scale)
    lines = read_regular(path, LARGEST_SAVED).split(b"\n") if path.exists() else []
    return {result.key: result for line in lines if line for result in [parse_result(path, line)]}


def saved_path(out: Path, study: str, scale: str) -> Path:
    return out / SAVED / f"{study}-{scale}.jsonl"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval; a single seed has none."""

    mean: float
    half: float | None
    """Half the width of the interval."""

    def describe(self, digits: int = 2) -> str:
        """`34.20 ± 0.31`, or the mean alone."""
        shown = f"{self.mean:,.{digits}f}"
        return shown if self.half is None else f"{shown} ± {self.half:,.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and t interval; None without values."""
    if not values:
        return None
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), half)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Mean and t interval of `first` - `second`, seed by seed; None where they have no seed in common.

    A seed gives all models of a study the same batches in the same order, so much of their luck is shared.
    """
    return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def t_quantile(freedom: int, share: float = 0.95) -> float:
    """The t for which Student's distribution of `freedom` degrees has this share between -t and t."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < share else (low, middle)
    return high


def share_within(t: float, freedom: int) -> float:
    """The share of Student's distribution between -t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for step in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@dataclass(frozen=True)
class Results:
    """All results of a study at a scale, in the order of its plan."""

    study: str
    scale: str
    planned: int
    """Number of trainings in the whole study."""
    entries: list[Result]
    changed: Sequence[str] = ()
    """The rows whose results were made with other settings than the study has now."""

    @property
    def finished(self) -> list[Result]:
        return [entry for entry in self.entries if not entry.failed]

    @property
    def failures(self) -> list[Result]:
        return [entry for entry in self.entries if entry.failed]

    def select(self, **labels: str | float) -> Results:
        """The results with these labels."""
        return replace(self, entries=[entry for entry in self.entries if labels.items() <= entry.labels.items()])

    def rename(self, rename: Callable[[Result], str]) -> Results:
        """The same with other names for its rows."""
        return replace(self, entries=[replace(entry, name=rename(entry)) for entry in self.entries])

    def names(self) -> list[str]:
        """The rows: what the seeds of a training have in common."""
        return list(dict.fromkeys(entry.name for entry in self.entries))

    def of(self, name: str) -> list[Result]:
        """The finished seeds of a row."""
        return [entry for entry in self.finished if entry.name == name]

    def by_seed(self, name: str, measure: str) -> dict[int, float]:
        """A measure of each finished seed of a row that has it."""
        found = {entry.seed: entry.measures.get(measure) for entry in self.of(name)}
        return {seed: float(value) for seed, value in found.items() if value is not None}

    def values(self, name: str, measure: str) -> list[float]:
        """The same without the seeds."""
        return list(self.by_seed(name, measure).values())

    def labels(self, name: str) -> dict[str, Any]:
        return next(entry.labels for entry in self.entries if entry.name == name)

    def estimate(self, name: str, measure: str) -> Estimate | None:
        return estimate(self.values(name, measure))

    def cell(self, name: str, measure: str, digits: int = 2) -> str:
        """A row's cell in a table: mean and interval, `failed`, or nothing yet."""
        if values := self.values(name, measure):
            return describe_values(values, digits)
        return "failed" if any(entry.name == name for entry in self.failures) else ""


def distinct(values: Iterable[str]) -> str:
    """The distinct values, separated by commas."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or "unknown"


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, with a title and notes."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    """Lines below it."""

    def to_markdown(self) -> str:
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [row_of(self.columns), row_of("---" for _ in self.columns)]
        lines += [row_of(row) for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Figure:
    """A file, and what it shows: its title, and its text where it cannot be seen."""

    path: Path
    about: str


def describe_all(values: Iterable[Sequence[float]], digits: int) -> list[str]:
    """A cell for each list of values of all seeds."""
    return [describe_values(each, digits) for each in values]


def describe_values(values: Sequence[float], digits: int) -> str:
    """Mean and interval, or nothing; two values as they are, whose interval is 13 times as wide as they lie apart.

    What is 0 throughout is `0`.
    """
    if values and not any(values):
        return "0"
    if len(values) == 2:
        return " / ".join(f"{value:,.{digits}f}" for value in values)
    found = estimate(values)
    return found.describe(digits) if found else ""


def row_of(cells: Iterable[str]) -> str:
    """A line of a Markdown table, cells escaped."""
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@dataclass(frozen=True)
class Claim:
    """A difference that the paper reports, and what would confirm it here."""

    first: str
    second: str
    """Rows of the study: `first` compared with `second`."""
    expected: Literal["above", "below", "equal", "no worse"]
    paper: str
    """The paper's difference, if known, and how we know it."""
    margin: float = 0.5
    """How far apart "equal" may be, or how far below "no worse"."""
    where: str = ""
    """Of what or on which text, where a study has several."""

    def describe(self) -> str:
        """`relu above softmax`, or `relu above softmax: 512 slots`."""
        says = {
            "equal": f"{self.first} within {self.margin:g} of {self.second}",
            "no worse": f"{self.first} at most {self.margin:g} below {self.second}",
        }.get(self.expected, f"{self.first} {self.expected} {self.second}")
        return ": ".join(filter(None, (says, self.where)))


CLAIM = "claim"
"""The first column of a table of claims."""
RULE = (
    'Agree: the 95 % interval of our difference, paired over seeds, lies on the paper\'s side of 0 or, for "within" '
    'and "at most ... below", inside the margin. Disagree: it lies on the other side. Open: neither.'
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


def judge_rows(
    claims: Sequence[Claim], results: Results, measure: str, unit: str, digits: int = 2
) -> list[tuple[str, ...]]:
    """Our difference and the verdict for every claim whose rows are in the results."""
    known = [claim for claim in claims if {claim.first, claim.second} <= set(results.names())]
    found = [difference(*(results.by_seed(name, measure) for name in (each.first, each.second))) for each in known]
    return verdict_rows(list(zip(known, found, strict=True)), unit, digits)


def verdict_rows(judged: Sequence[tuple[Claim, Estimate | None]], unit: str, digits: int = 2) -> list[tuple[str, ...]]:
    """Claims, each with our difference and the verdict."""
    return [
        (each.describe(), each.paper, f"{signed(found, digits)} {unit}".strip() if found else "", verdict(found, each))
        for each, found in judged
    ]


def claims_table(rows: Sequence[tuple[str, ...]]) -> Table:
    return Table("What the papers claim", (CLAIM, "paper", "ours", "verdict"), rows)


def signed(found: Estimate | None, digits: int = 2) -> str:
    """A difference with its sign; nothing where there is none."""
    text = found.describe(digits) if found else ""
    return f"+{text}" if text and not text.startswith("-") else text
