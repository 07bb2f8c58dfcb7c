"""The two typer apps, and the arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rectiformer.errors import ArgumentError, unknown_name

SEARCH, SAMPLING, DOCUMENTS, MODEL = "Search", "Sampling", "Documents", "Model and machine"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Attention with the softmax replaced by a ReLU: exact zeros, heads that can attend to nothing.",
)
data = typer.Typer(no_args_is_help=True, help="Generate a toy corpus, or turn text into subword ids.")
app.add_typer(data, name="data")


def option(help: str, *names: str, panel: str | None = None, one_of: tuple[str, ...] = (), **settings: Any) -> Any:
    """An option; with `one_of`, a word that is none of these is refused."""

    def check(value: str) -> str:
        if value not in one_of:
            raise ArgumentError(unknown_name(f"value of {names[0]}", value, one_of))
        return value

    return typer.Option(*names, help=help, rich_help_panel=panel, callback=check if one_of else None, **settings)


ConfigFile = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="TOML file; without one, the defaults.")]
Overrides = Annotated[
    list[str] | None, option("Override one key; may be repeated.", "--set", metavar="SECTION.KEY=VALUE")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder written by `rectiformer train`.")]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Sentences, one per line: plain, .gz or .xz; - for standard input.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Their translations, line by line.")]
OutFile = Annotated[
    Path | None, option("Output file instead of standard output; replaced only when everything is done.", "--out")
]
AsJson = Annotated[bool, option("Write JSON lines.", "--json")]
Beam = Annotated[int, option("Hypotheses kept per sentence; 1 is greedy.", panel=SEARCH, min=1)]
Penalty = Annotated[
    float, option("Scores are divided by ((5 + length) / 6) to this power.", "--length-penalty", panel=SEARCH)
]
Checkpoint = Annotated[str, option("Checkpoint: best, latest, a step, or a path.", panel=MODEL)]
Device = Annotated[str, option("auto, cpu or cuda.", panel=MODEL)]
Precision = Annotated[str, option("Precision of matrix products: fp32 or bf16.", "--precision", panel=MODEL)]
BatchTokens = Annotated[int, option("Tokens per batch, padding included.", panel=MODEL, min=1)]
BadUtf8 = Annotated[
    str,
    option(
        "What to do with lines that are not UTF-8: error, replace or skip.",
        "--bad-utf8",
        one_of=("error", "replace", "skip"),
    ),
]
TooLong = Annotated[
    str,
    option(
        "What to do with lines longer than --max-length: split, cut or error.",
        "--too-long",
        one_of=("split", "cut", "error"),
    ),
]
BatchSentences = Annotated[
    int,
    option(
        "Sentences per batch, instead of --batch-tokens; 1 also prints each translation at once.", panel=MODEL, min=0
    ),
]
LinkFormat = Annotated[
    str,
    option(
        "Format of word links: pharaoh, talp or naacl.",
        "--format",
        one_of=("pharaoh", "talp", "naacl"),
    ),
]
Documents = Annotated[
    str,
    option(
        "Where documents start: after a blank line (blank), at a line `<d>` (marker), or none.",
        "--documents",
        panel=DOCUMENTS,
        one_of=("none", "blank", "marker"),
    ),
]
SegmentLength = Annotated[
    int | None, option("Source subwords per segment, at most; default: as in training.", panel=DOCUMENTS, min=1)
]
Overlap = Annotated[
    int, option("Sentences of the previous segment that are read again as context.", panel=DOCUMENTS, min=0)
]
ShardSource = Annotated[
    bool,
    option(
        "Split each source among the processes of torchrun, when it is too large for one device.",
        "--shard-source",
        panel=DOCUMENTS,
    ),
]
