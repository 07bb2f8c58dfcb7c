"""Write the tables in docs/variants.md from the tables in the code: `make docs`. A test checks that they match."""

import re
from collections.abc import Iterable
from pathlib import Path

from rectiformer import MEMORIES, VARIANTS

PAGE = Path(__file__).parent / "variants.md"


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def variants_table() -> str:
    header = ["variant", "weight", "row scale", "output norm", "options", "paper", "when to use", "runs as"]
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


def fill_tables(text: str) -> str:
    for name, table in (("variants", variants_table()), ("memories", memories_table())):
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match, table=table: match[1] + table + "\n" + match[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
