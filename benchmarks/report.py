"""Print the points of a results file as Markdown tables, the latest point of each setting: for docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def latest_points(path: Path) -> dict[tuple, dict]:
    """The last record of every (dtype, mask, pass, variant, length); a later run replaces an earlier one."""
    points = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        mask = "causal" if record["causal"] else "full"
        points[record["dtype"], mask, record["pass"], record["name"], record["length"]] = record
    return points


def tables(points: dict[tuple, dict], names: list[str]) -> str:
    """SDPA's time over ours with its 20th and 80th percentile: one row per variant and pass, one column per length."""
    lengths = sorted({key[4] for key in points if not names or key[3] in names})
    lines = []
    for dtype, mask in dict.fromkeys(key[:2] for key in points):
        rows = dict.fromkeys(key[2:4] for key in points if key[:2] == (dtype, mask) and (not names or key[3] in names))
        if rows:
            lines += [f"\n{dtype}, {mask}:\n", "| variant | pass | " + " | ".join(map(str, lengths)) + " |"]
            lines += ["| --- | --- |" + " --- |" * len(lengths)]
        for direction, name in rows:
            cells = [cell(points.get((dtype, mask, direction, name, length))) for length in lengths]
            lines.append(f"| `{name}` | {direction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(record: dict | None) -> str:
    if record is None:
        return ""
    ratio = record["ratio"]
    return f"**{ratio['p50']:.2f}** ({ratio['p20']:.2f}-{ratio['p80']:.2f})"


def memory(points: dict[tuple, dict]) -> str:
    """Memory beyond inputs and results at the longest length, compared with that of dense scores."""
    longest = max(key[4] for key in points)
    lines = ["| variant | dtype | mask | pass | extra MiB | dense scores MiB |", "| --- |" + " --- |" * 5]
    for (dtype, mask, direction, name, length), record in points.items():
        if length == longest and record["implementation"] == "blocked":
            dense = record["batch"] * record["heads"] * length**2 * (4 if dtype == "fp32" else 2) / 2**20
            lines.append(f"| `{name}` | {dtype} | {mask} | {direction} | {record['extra_mib']:.1f} | {dense:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("benchmarks/results/attention-cpu.jsonl"))
    parser.add_argument("--names", nargs="+", default=[], help="only these variants")
    options = parser.parse_args()
    points = latest_points(options.file)
    print(tables(points, options.names))
    print(f"\n{memory(points)}")


if __name__ == "__main__":
    main()
