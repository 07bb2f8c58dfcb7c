"""What finished trainings have left on disk, and statistics over their seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rectiformer.errors import DataError
from rectiformer.files import parse_object, read_regular, replace_file

FORMAT = 1
RESULT, FAILURE = "result.json", "failed.json"
SAVED = "results"
"""The folder of saved results: NAME-SCALE.jsonl, a result a line, small enough to be kept with the code."""
LARGEST = 2**24  # bytes of a result; ours have some thousands
LARGEST_SAVED = 2**28


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training, finished or failed, and all that is needed to tell where its numbers come from."""

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
        """Put it in `folder`, whole or not at all; a failure never takes the place of a result."""
        content = self.to_json(indent=1).encode()
        replace_file(folder / (FAILURE if self.failed else RESULT), content + b"\n")
        if not self.failed:
            (folder / FAILURE).unlink(missing_ok=True)


def read_result(folder: Path) -> Result | None:
    """What is known of the training in `folder`: its result, else its failure, else nothing."""
    for name in (RESULT, FAILURE):
        path = folder / name
        if path.exists():
            return parse_result(path, read_regular(path, LARGEST))
    return None


def parse_result(path: Path, text: bytes) -> Result:
    """The result that a file, or a line of it, holds; DataError where it is none."""
    content = parse_object(path, text)
    found = content.pop("format", None)
    if found != FORMAT:
        raise DataError(f"{path} has format {found!r}, this rectiformer reads {FORMAT}; remove it to run it again")
    try:
        return Result(**content)
    except TypeError as error:
        raise DataError(f"{path} is no result of a study ({error}); remove it to run it again") from error


def save_results(results: Results, out: Path) -> None:
    """Write all that is known as one file of lines, which `read_saved` reads; folders of this machine are left out."""
    path = saved_path(out, results.study, results.scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    portable = [replace(entry, failed=entry.failed.replace(str(out), "OUT")) for entry in results.entries]
    replace_file(path, "".join(f"{entry.to_json()}\n" for entry in portable).encode())


def read_saved(out: Path, study: str, scale: str) -> dict[str, Result]:
    """The results that were saved of a study at a scale, by key; none where none were."""
    path = saved_path(out, study, scale)
    lines = read_regular(path, LARGEST_SAVED).split(b"\n") if path.exists() else []
    return {result.key: result for line in lines if line for result in [parse_result(path, line)]}


def saved_path(out: Path, study: str, scale: str) -> Path:
    return out / SAVED / f"{study}-{scale}.jsonl"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval, which one seed does not have."""

    mean: float
    half: float | None
    """Half the width of the interval."""
    count: int

    def describe(self, digits: int = 2) -> str:
        """`34.20 ± 0.31`, or the mean alone."""
        shown = f"{self.mean:.{digits}f}"
        return shown if self.half is None else f"{shown} ± {self.half:.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and t interval; None of no values."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t_quantile(count - 1) * math.sqrt(variance(values) / count), count)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Mean and t interval of `first` less `second`, seed by seed; None where they have no seed in common.

    A seed gives all models of a study the same batches in the same order, so that much of their luck is common.
    """
    return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def variance(values: Sequence[float]) -> float:
    """Of a sample, without bias."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def t_quantile(freedom: int, share: float = 0.95) -> float:
    """The t that a variable with so many degrees of freedom stays within, up to its sign, in this share of cases."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < share else (low, middle)
    return high


def share_within(t: float, freedom: int) -> float:
    """How much of Student's distribution lies between -t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
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
    """All that is known of a study at a scale, in the order of its plan."""

    study: str
    scale: str
    planned: int
    """Trainings of the whole study."""
    entries: list[Result]
    changed: Sequence[str] = ()
    """The rows that have results of other settings than the study has now."""

    @property
    def finished(self) -> list[Result]:
        return [entry for entry in self.entries if not entry.failed]

    @property
    def failures(self) -> list[Result]:
        return [entry for entry in self.entries if entry.failed]

    def names(self) -> list[str]:
        """The rows there are: what the seeds of a training have in common."""
        return list(dict.fromkeys(entry.name for entry in self.entries))

    def of(self, name: str) -> list[Result]:
        """The finished seeds of a row."""
        return [entry for entry in self.finished if entry.name == name]

    def by_seed(self, name: str, measure: str) -> dict[int, float]:
        """A number of each finished seed of a row that has it."""
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
        """What a table says of a row: mean and interval, that it failed, or nothing yet."""
        found = self.estimate(name, measure)
        if found is not None:
            return found.describe(digits)
        return "failed" if any(entry.name == name for entry in self.failures) else ""

    def means(self, name: str, measures: Iterable[str]) -> str:
        """Several means in one cell, with slashes between; empty where there is none."""
        found = [self.estimate(name, measure) for measure in measures]
        return " / ".join(f"{each.mean:.2f}" for each in found if each is not None)


def distinct(values: Iterable[str]) -> str:
    """The different values, with commas between; for a line on where numbers come from."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or "unknown"


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
