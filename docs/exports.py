"""Rewrite the table of docs/export.md from rectiformer/integrations/export.py.

python docs/exports.py          # at once
python docs/exports.py --check  # export all that the table promises, with random weights: some minutes
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed

import torch

from rectiformer.cli.exporting import EXPORTERS
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError
from rectiformer.integrations.export import FORMATS, placements, table
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
    return Translator(Transformer(config, words.size, words.size, bos=words.bos).eval(), words, words)


def attempt(format: str, variant: str, norm: str) -> bool:
    """Whether one export succeeds; keys are not centered where the table says that this is needed."""
    others = {"center_keys": "no"} if "center_keys" in placements(variant, format) else {}
    with TemporaryDirectory() as folder:
        try:
            EXPORTERS[format](build(variant, norm=norm, **others), Path(folder) / "out")
        except ArgumentError as error:
            print(f"{variant}, {norm}, {format}: {error}", flush=True)
            return False
    return True


def wrong_promises() -> list[str]:
    """What the table promises and does not happen."""
    promised = [
        (format, variant, norm)
        for variant in VARIANTS
        for format in FORMATS
        for norm in ("post", "pre")
        if norm in placements(variant, format)
    ]
    return [" ".join(each) for each in promised if not attempt(*each)]


def markdown() -> str:
    rows = [f"| variant | {' | '.join(FORMATS)} |", "| --- |" + " --- |" * len(FORMATS)]
    rows += [f"| `{variant}` | {' | '.join(cells)} |" for variant, *cells in table()]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where the table is not true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + markdown() + END, text, flags=re.DOTALL)
    if options.check:
        sys.exit(new != text or bool(wrong_promises()))
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
