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
data = typer.Typer(no_args_is_help=True, help="Make a corpus, or turn text into subword ids.")
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
    str, typer.Argument(metavar="SOURCE", help="Sentences, one a line: plain, .gz or .xz; - for standard input.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Their translations, line by line.")]
OutFile = Annotated[
    Path | None, option("File to write, instead of standard output; replaced once all is there.", "--out")
]
AsJson = Annotated[bool, option("Write JSON lines.", "--json")]
Beam = Annotated[int, option("Hypotheses kept a sentence; 1 is greedy.", panel=SEARCH, min=1)]
Penalty = Annotated[
    float, option("Scores are divided by ((5 + length) / 6) to this power.", "--length-penalty", panel=SEARCH)
]
Checkpoint = Annotated[str, option("best, latest, a step, or a path.", panel=MODEL)]
Device = Annotated[str, option("auto, cpu or cuda.", panel=MODEL)]
Precision = Annotated[str, option("Of matrix products: fp32 or bf16.", "--precision", panel=MODEL)]
BatchTokens = Annotated[int, option("Padded tokens in a batch.", panel=MODEL, min=1)]
BadUtf8 = Annotated[
    str,
    option("Lines that are not UTF-8: error, replace or skip.", "--bad-utf8", one_of=("error", "replace", "skip")),
]
TooLong = Annotated[
    str,
    option("Lines of more than --max-length: split, cut or error.", "--too-long", one_of=("split", "cut", "error")),
]
BatchSentences = Annotated[
    int, option("Sentences in a batch, instead of tokens; 1 also answers each line at once.", panel=MODEL, min=0)
]
LinkFormat = Annotated[
    str, option("Of all links: pharaoh, talp or naacl.", "--format", one_of=("pharaoh", "talp", "naacl"))
]
Documents = Annotated[
    str,
    option(
        "Where one starts: after a blank line, at a line `<d>` (marker), or none.",
        "--documents",
        panel=DOCUMENTS,
        one_of=("none", "blank", "marker"),
    ),
]
SegmentLength = Annotated[
    int | None, option("Most source subwords at once; as the run was trained, unless given.", panel=DOCUMENTS, min=1)
]
Overlap = Annotated[
    int, option("Sentences before a segment that it is given as context, once more.", panel=DOCUMENTS, min=0)
]
ShardSource = Annotated[
    bool,
    option(
        "All processes of torchrun hold a part of each source, for one that no device holds.",
        "--shard-source",
        panel=DOCUMENTS,
    ),
]
