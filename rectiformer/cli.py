"""The command line: one function a command. Parse, call one function, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rectiformer.errors import RectiformerError, unknown_name

if TYPE_CHECKING:
    from rectiformer.demo import Outcome

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Attention with the softmax replaced by a ReLU: exact zeros, heads that can attend to nothing.",
)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file; defaults apply without one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rectiformer {version('rectiformer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def variants(
    name: Annotated[str | None, typer.Argument(help="Show everything about one variant.")] = None,
) -> None:
    """List every attention variant: formula, paper, implementations."""
    from rectiformer.ops.variants import VARIANTS

    console = Console()
    if name is not None:
        if name not in VARIANTS:
            raise RectiformerError(unknown_name("variant", name, VARIANTS))
        _print_variant(console, name)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("variant", "weight of a key", "paper", "runs as"):
        table.add_column(column, no_wrap=column == "variant")
    for variant in VARIANTS.values():
        table.add_row(variant.name, escape(variant.formula), variant.paper, ", ".join(variant.implementations))
    console.print(table)
    console.print(
        "\nx score, n keys the row sees, \\[.]+ ReLU. `rectiformer variants NAME` shows norm, options and use of one.",
        style="dim",
    )


def _print_variant(console: Console, name: str) -> None:
    from rectiformer.ops.variants import VARIANTS

    variant = VARIANTS[name]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("variant", variant.name)
    table.add_row("weight", escape(variant.formula))
    table.add_row("row scale", variant.scale)
    table.add_row("output norm", variant.output_norm)
    for key, option in variant.options.items():
        learned = ", learnable" if option.learn else ""
        table.add_row("option", f"{key} = {option.default:g}: {option.about} ({option.needs}{learned})")
    table.add_row("paper", variant.paper)
    table.add_row("use", variant.use)
    table.add_row("runs as", ", ".join(variant.implementations))
    console.print(table)


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="TOML file to check; defaults apply without one.")] = None,
    overrides: Overrides = None,
) -> None:
    """Print the whole configuration, defaults included, as TOML."""
    from rectiformer.config import load_config, to_toml

    print(to_toml(load_config(file, overrides or [])), end="")


@app.command()
def demo(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Train a rectified and a softmax head to look words up, and show what each looks at. Takes seconds."""
    from rectiformer.config import load_config
    from rectiformer.demo import train_lookup

    settings = load_config(config, overrides or [])
    console = Console()
    console.print(
        "Each word asks: the last time I appeared, which word came after me? First appearances have no answer.\n"
    )
    for variant in dict.fromkeys([settings.attention.variant, "softmax"]):
        with Progress(console, variant, settings.demo.steps) as advance:
            outcome = train_lookup(settings, variant, advance)
        _print_outcome(console, outcome)


def _print_outcome(console: Console, outcome: Outcome) -> None:
    """One sentence, word by word: where its row of weights lies, and the numbers over all test sentences."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=None)
    table.add_column("word")
    table.add_column("looks at", min_width=34)
    table.add_column("row sum", justify="right")
    table.add_column("answer")
    mean = outcome.weights.mean(0)  # over heads: [N, N]
    for position, word in enumerate(outcome.sentence):
        row = mean[position, : position + 1]
        order = [int(key) for key in row.argsort(descending=True) if row[key] != 0]
        shown = [f"{outcome.sentence[key]} {row[key]:.2f}" for key in order[:3]]
        rest = f" and {len(order) - 3} more" if len(order) > 3 else ""
        looks = Text(", ".join(shown) + rest) if order else Text("nothing", style="bold cyan")
        right = outcome.answers[position] == outcome.expected[position]
        answer = Text(outcome.answers[position], style="" if right else "red")
        table.add_row(word, looks, f"{row.sum():.2f}", answer)
    console.print(table)
    stats = outcome.stats
    console.print(
        f"[bold]{outcome.variant}[/]: {outcome.accuracy:.1%} right; "
        f"{stats.sparsity.mean():.1%} of visible weights are exactly 0; the head attends to nothing at "
        f"{outcome.null_when_unknown:.1%} of first appearances and {outcome.null_when_known:.1%} of repeated words.\n"
    )


class Progress:
    """A progress bar on a terminal, a plain line every quarter of the way elsewhere."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        from rich import progress

        self.console, self.name, self.steps, self.done = console, name, steps, 0
        columns = (
            progress.TextColumn("training {task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]:.4f}"),
            progress.TimeRemainingColumn(),
        )
        self.bar = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(name, total=steps, loss=float("nan"))

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, loss: float) -> None:
        self.done += 1
        self.bar.update(self.task, advance=1, loss=loss)
        if not self.console.is_terminal and (self.done * 4 % self.steps < 4 or self.done == self.steps):
            self.console.print(f"training {self.name}: step {self.done} of {self.steps}, loss {loss:.4f}")


def main() -> None:
    """Run a command; what a user can cause comes out as one line, not as a traceback."""
    try:
        app()
    except RectiformerError as error:
        print(f"rectiformer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
