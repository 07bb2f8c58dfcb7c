"""The command that writes a trained model for other engines."""

from pathlib import Path
from typing import Annotated

from rectiformer.cli.inputs import warn
from rectiformer.cli.options import Checkpoint, RunFolder, app, option
from rectiformer.integrations.ctranslate2 import export_ctranslate2
from rectiformer.integrations.export import require_new
from rectiformer.integrations.marian import export_transformers
from rectiformer.integrations.onnx import export_onnx
from rectiformer.terminal import Terminal
from rectiformer.translate.translator import Translator

EXPORTERS = {"onnx": export_onnx, "ctranslate2": export_ctranslate2, "transformers": export_transformers}


@app.command()
def export(
    run: RunFolder,
    to: Annotated[str, option("Format: onnx, ctranslate2 or transformers.", "--to", one_of=tuple(EXPORTERS))],
    out: Annotated[Path, option("Folder to create.", "--out")],
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a trained model for other engines.

    onnx: two graphs for onnxruntime; `rectiformer translate` reads them too. Takes every variant but topk; norm post or
    pre.

    ctranslate2: a folder for its C++ engine. Takes softmax; norm post.

    transformers: a folder for MarianMT. Takes softmax, rela, rela-i, reluformer (center_keys = "no"), relu-seqlen; norm
    post.

    A model that a format cannot hold is refused with the reason and the formats that can.

        rectiformer export runs/tiny --to onnx --out tiny-onnx
        echo "Der Hund schläft." | rectiformer translate tiny-onnx
    """
    require_new(out)
    terminal = Terminal(stderr=True)
    translator = Translator.from_run(run, checkpoint, device="cpu", notice=warn)
    EXPORTERS[to](translator, out, terminal.note)
    sizes = ", ".join(f"{path.name} ({path.stat().st_size:,} bytes)" for path in sorted(out.iterdir()))
    terminal.note(f"wrote {out}: {sizes}")
