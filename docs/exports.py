"""Rewrite the table of docs/export.md: every variant is exported to every format, and what happened is written down.

python docs/exports.py          # some minutes
python docs/exports.py --check  # only say whether the table is still true
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed

import torch

from rectiformer.cli.exporting import FORMATS, find_exporter
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import VARIANTS
from rectiformer.text.grammar import draw_sentences
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator

PAGE = Path(__file__).with_name("export.md")
BEGIN, END = "<!-- exports -->\n", "<!-- /exports -->"


def build(variant: str, **others: str) -> Translator:
    """A translator of one layer with random weights."""
    words = Vocabulary.train([pair.source for pair in draw_sentences(200, seed=1)], VocabularyConfig(size=120))
    torch.manual_seed(1)
    config = ModelConfig(
        hidden_size=32,
        num_heads=2,
        ffn_size=32,
        encoder_layers=1,
        decoder_layers=1,
        variant=variant,
        **others,  # type: ignore
    )
    return Translator(Transformer(config, words.size, words.size, start=words.bos).eval(), words, words)


def attempt(format: str, variant: str) -> str:
    """What became of one export; with keys that are not centered, where that is all that stands in the way."""
    with TemporaryDirectory() as folder:
        try:
            find_exporter(format)(build(variant), Path(folder) / "out")
            return "yes"
        except ArgumentError as error:
            if "center" not in str(error):
                return "no"
        try:
            find_exporter(format)(build(variant, center_keys="no"), Path(folder) / "out")
            return 'with `model.center_keys = "no"`'
        except ArgumentError:
            return "no"


def table(variants: Sequence[str]) -> str:
    rows = [f"| variant | {' | '.join(FORMATS)} |", "| --- |" + " --- |" * len(FORMATS)]
    for variant in variants:
        rows.append(f"| `{variant}` | " + " | ".join(attempt(format, variant) for format in FORMATS) + " |")
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where the table is not true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table(list(VARIANTS)) + END, text, flags=re.DOTALL)
    if options.check:
        sys.exit(new != text)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
