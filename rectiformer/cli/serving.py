"""Commands that answer a browser or a client: serve, explore."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from rectiformer.cli.inputs import distinct_names, find_head, open_run_translator, parse_head, warn
from rectiformer.cli.options import BatchTokens, Checkpoint, Device, Precision, RunFolder, app, option
from rectiformer.runs.folder import open_run
from rectiformer.terminal import Terminal
from rectiformer.text.samples import languages, sample_pairs
from rectiformer.translate.translator import Translator

REQUEST, QUEUE = "Limits of a request", "Limits of the server"
EXAMPLES = 8
"""Sentences that `explore` offers to choose from."""


@app.command()
def serve(
    context: typer.Context,
    run: RunFolder,
    host: Annotated[str, option("Address to listen on; any but the local one needs a token.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[
        Path | None, option("File with the token that clients must send; or set RECTIFORMER_TOKEN.")
    ] = None,
    alignments: Annotated[
        str,
        option(
            "Head that gives word links, LAYER:HEAD:INDUCTION, counted from 1; default: the one that `align` takes."
        ),
    ] = "",
    max_header_bytes: Annotated[int, option("Bytes of the request line and headers.", panel=REQUEST, min=1)] = 16_384,
    max_bytes: Annotated[int, option("Bytes of the body.", panel=REQUEST, min=1)] = 262_144,
    max_sentences: Annotated[int, option("Sentences, over all documents.", panel=REQUEST, min=1)] = 128,
    max_sentence_tokens: Annotated[int, option("Subwords per sentence.", panel=REQUEST, min=1)] = 256,
    max_tokens: Annotated[int, option("Subwords in all.", panel=REQUEST, min=1)] = 8_192,
    max_beam: Annotated[int, option("Largest beam.", panel=REQUEST, min=1)] = 8,
    max_nbest: Annotated[int, option("Translations returned per sentence.", panel=REQUEST, min=1)] = 8,
    max_heads: Annotated[int, option("Sentences of a request with heads.", panel=REQUEST, min=1)] = 4,
    max_heads_tokens: Annotated[int, option("Subwords of a request with heads.", panel=REQUEST, min=1)] = 128,
    body_seconds: Annotated[
        float, option("Seconds for the headers to arrive, and again for the body.", panel=REQUEST)
    ] = 10.0,
    deadline: Annotated[float, option("Seconds from acceptance to answer.", panel=REQUEST)] = 30.0,
    max_connections: Annotated[int, option("Open connections, as far as ulimit -n allows.", panel=QUEUE, min=1)] = 512,
    queue_requests: Annotated[int, option("Requests accepted but not yet answered.", panel=QUEUE, min=1)] = 256,
    queue_sentences: Annotated[int, option("Sentences of these requests.", panel=QUEUE, min=1)] = 2_048,
    drain: Annotated[float, option("Seconds to finish these requests after SIGTERM.", panel=QUEUE)] = 30.0,
    batch_tokens: BatchTokens = 4_096,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Translate over HTTP, until SIGTERM or Ctrl-C.

    JSON at /v1/translate, a page for the browser at /, Prometheus metrics at /metrics. Requests over a limit are
    refused with a message, never cut. Texts are not logged. More in docs/serving.md.

        rectiformer serve runs/rela --port 8000
    """
    from rectiformer.connections import address, bind, fit_files
    from rectiformer.serve.app import Served
    from rectiformer.serve.limits import Limits
    from rectiformer.serve.server import read_token
    from rectiformer.serve.server import serve as serve_until_stopped

    limits = Limits(**{limit.name: context.params[limit.name] for limit in fields(Limits)})
    limits, token = fit_files(limits, warn), read_token(host, token_file)
    with bind(host, port) as bound:  # a port that is taken shows before the model is read
        translator = Translator.from_run(run, checkpoint, device, precision, notice=warn)
        align_by = find_head(translator, parse_head(alignments) if alignments else None)
        spoken = languages(open_run(run).config.data)
        served = Served(translator, run.resolve().name, limits, token, align_by, spoken)
        terminal = Terminal()

        def announce() -> None:
            terminal.note(f"serving {served.name} at {address(bound)} (Ctrl-C ends it)")
            terminal.note("limits: " + ", ".join(f"{name} {value:g}" for name, value in asdict(limits).items()))

        serve_until_stopped(served, bound, announce)


@app.command()
def explore(
    run: RunFolder,
    other: Annotated[Path | None, typer.Argument(metavar="RUN2", help="Another run to compare with.")] = None,
    port: Annotated[int, option("Port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, option("Print the address without opening a browser.", "--no-browser")] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Type a sentence and see what every head does, in the browser.

    Choose a validation sentence or type one, force a target, switch heads off, compare two runs. The page is served
    to this machine only, until Ctrl-C. Needs the extra `serve`.

        rectiformer explore runs/rela runs/softmax
    """
    from rectiformer.analyze.explorer import HOST, Answerer, Text, open_browser
    from rectiformer.analyze.explorer import serve as serve_page
    from rectiformer.connections import address, bind

    runs = [run] if other is None else [run, other]
    names = distinct_names(runs)
    models = [
        Answerer(open_run_translator(folder, checkpoint, device, precision), name)
        for folder, name in zip(runs, names, strict=True)
    ]
    data = open_run(run).config.data
    text = Text(languages(data), sample_pairs(data, EXAMPLES))
    with bind(HOST, port) as bound:

        def announce() -> None:
            Terminal().note(f"exploring {' vs. '.join(names)} at {address(bound)} (Ctrl-C ends it)")
            if not no_browser:
                open_browser(address(bound))

        serve_page(models, text, bound, announce)
