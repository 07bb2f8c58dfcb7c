"""Write the tables in docs/variants.md and docs/benchmarks.md, from those in the code and from measured points: `make
docs`. A test checks that they match."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmark_tables import TABLES as BENCHMARKS

from rectiformer import MEMORIES, VARIANTS

FOLDER = Path(__file__).parent


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def variants_table() -> str:
    header = ["variant", "weight", "row scale", "output norm", "options", "paper", "when to use", "backends"]
    rows = []
    for variant in VARIANTS.values():
        options = [
            f"`{name}` = {option.default:g}{' (learnable)' if option.learn else ''}: {option.about}"
            for name, option in variant.options.items()
        ]
        norm = "none" if variant.output_norm == "none" else f"`{variant.output_norm}`"
        norm += "; keys centered in translators" if variant.center_keys else ""
        cells = [f"`{variant.name}`", f"`{variant.formula}`", variant.scale, norm, "; ".join(options) or "none"]
        rows.append([*cells, variant.paper, variant.use, ", ".join(variant.implementations)])
    return markdown(header, rows)


def memories_table() -> str:
    header = ["memory", "output", "keeps", "paper", "when to use"]
    rows = [
        [f"`{memory.name}`", f"`{memory.formula}`", memory.keeps or "all slots", memory.paper, memory.use]
        for memory in MEMORIES.values()
    ]
    return markdown(header, rows)


PAGES: dict[Path, Mapping[str, Callable[[], str]]] = {
    FOLDER / "variants.md": {"variants": variants_table, "memories": memories_table},
    FOLDER / "benchmarks.md": BENCHMARKS,
}


def fill_tables(page: Path) -> str:
    """The text of a page with all of its tables made anew."""
    text = page.read_text(encoding="utf-8")
    for name, write in PAGES[page].items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
        table = write()
        text, found = re.subn(
            pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(f"{page.name} has {found} tables called {name!r}, but needs one")
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_tables(page), encoding="utf-8")
