"""ONNX: a translator written as two graphs that onnxruntime runs anywhere, and a translator that reads them back.

export_onnx(Translator.from_run("runs/tiny", device="cpu"), Path("tiny-onnx"))
OnnxTranslator("tiny-onnx").translate(["Der Hund schläft."], SearchOptions())
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import damaged
from rectiformer.integrations.exportable import require_exportable
from rectiformer.integrations.folder import (
    Report,
    export_folder,
    read_record,
    require_new,
    require_packages,
    write_record,
)
from rectiformer.integrations.onnx_graphs import write_graphs
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.options import Hypothesis, SearchOptions
from rectiformer.translate.translator import Part, Translator

SHAPES = ((1, 1, 1, 1), (2, 4, 2, 12), (3, 2, 20, 30))
"""Batch, beam, steps and source length at which graphs are compared with the model they come from."""
CLOSE = 1e-3
"""Of the largest logit: far more than rounding, far less than a wrong operator."""


def export_onnx(translator: Translator, out: Path, report: Report = lambda line: None) -> None:
    """Write folder `out` with encoder.onnx, decoder.onnx, source.model, target.model and export.json.

    The graphs are run beside the model before the folder is there; what ONNX cannot express is an ArgumentError. They
    take sequences of up to twice `translator.longest` tokens.
    """
    require_packages("ONNX", "onnx", "onnx", "onnxscript", "onnxruntime")
    require_new(out)
    require_exportable(translator.model.config, "onnx")
    model, positions = translator.model.eval(), 2 * translator.longest
    if (model.output.device.type, model.output.dtype) != ("cpu", torch.float32):
        raise ArgumentError(f"the model is {model.output.dtype} on {model.output.device}; load it as fp32 on the cpu")
    with export_folder(out) as folder:
        report("translating the model into graphs")
        write_graphs(model, folder, positions)
        report("comparing the graphs with the model")
        graphs = OnnxTransformer(folder, translator.source.size, translator.target.size, positions)
        check_graphs(model, graphs)
        report("writing vocabularies and hashes")
        translator.source.save(folder / "source.model")
        translator.target.save(folder / "target.model")
        write_record(folder, "onnx", translator, positions=positions)


def check_graphs(model: Transformer, graphs: OnnxTransformer) -> None:
    """ArgumentError where the graphs give other logits than the model, at any step of random sentences."""
    generator = torch.Generator().manual_seed(1)

    def draw(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    with torch.inference_mode():
        for batch, beam, steps, length in SHAPES:
            source = draw(len(model.source_embedding.table), batch, length)
            lengths = 1 + draw(length, batch)
            state = model.begin(model.encode(source, lengths), lengths)
            other = graphs.begin(graphs.encode(source, lengths), lengths)
            for step in range(steps):
                tokens = draw(len(model.output), batch * beam)
                right, found = model.step(tokens, state), graphs.step(tokens, other)
                error = (found - right).abs().max() / right.abs().max()
                if not error <= CLOSE:
                    raise ArgumentError(
                        f"the graphs are not the model: with batch {batch}, beam {beam}, source length {length} its "
                        f"logits at step {step} are off by {error:.1e} of the largest; nothing was written"
                    )


class OnnxTranslator(Translator):
    """The translator of a folder written by `export_onnx`: the same search, with the model run by onnxruntime.

    It translates and samples; what looks inside a model (scores, alignments, heads) needs the run folder.

    Args:
        threads: that onnxruntime may use; as many as torch uses unless given.
    """

    def __init__(self, folder: str | Path, *, threads: int | None = None) -> None:
        require_packages("ONNX", "onnx", "onnxruntime")
        folder = Path(folder)
        record = read_record(folder, "onnx")
        try:
            source = Vocabulary.load(folder / "source.model", record["source"]["sha256"])
            target = Vocabulary.load(folder / "target.model", record["target"]["sha256"])
            positions, longest, segment = (int(record[name]) for name in ("positions", "longest", "segment"))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(folder / "export.json", f"it does not describe a translator ({error!r})") from error
        graphs = OnnxTransformer(folder, source.size, target.size, positions, threads)
        # A search asks a model for less than a Transformer has: what OnnxTransformer has.
        super().__init__(cast(Transformer, graphs), source, target, longest=longest, segment=segment)
        self.origin = str(record.get("fingerprint"))

    def fingerprint(self) -> str:
        """That of the translator which was exported."""
        return self.origin

    def search_all(self, parts: Sequence[Part], options: SearchOptions, *others: Any) -> list[list[Hypothesis]]:
        """The n best of each part, as a `Translator` finds them."""
        if not options.cache:
            raise ArgumentError("exported graphs decode with a cache only; leave --no-cache out, or use the run folder")
        return super().search_all(parts, options, *others)


@dataclass
class OnnxState:
    """Where a decoding stands: what the decoder's graph is given besides tokens."""

    lengths: Tensor  # [B]
    source: list[Tensor]  # [B, H, N, D] each
    past: list[Tensor] = field(default_factory=list)  # [B, K, H, T, D] each

    def reorder(self, rows: Tensor) -> None:
        """Let hypothesis r continue what was hypothesis rows[r]."""
        self.past = [held.flatten(0, 1).index_select(0, rows).view(held.shape) for held in self.past]

    def keep(self, sentences: Tensor, beam: int) -> None:
        """Go on with these sentences only."""
        self.lengths = self.lengths[sentences]
        self.source = [held.index_select(0, sentences) for held in self.source]
        self.past = [held.index_select(0, sentences) for held in self.past]


class OnnxTransformer(nn.Module):
    """Two graphs under the names by which a search knows a `Transformer`."""

    def __init__(self, folder: Path, sources: int, targets: int, positions: int, threads: int | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder = (open_graph(folder / f"{name}.onnx", threads) for name in ("encoder", "decoder"))
        require_pair(folder, self.encoder, self.decoder, targets)
        self.inputs = [each.name for each in self.decoder.get_inputs()]
        self.past_shapes = [each.shape for each in self.decoder.get_inputs() if each.name.startswith("past_")]
        self.positions = positions
        # A search reads sizes and the device of these two, and no numbers.
        self.source_embedding = SimpleNamespace(table=torch.empty(sources, 0))
        self.output = torch.empty(targets, 0)
        self.eval()

    def encode(self, source: Tensor, lengths: Tensor) -> list[Tensor]:
        """Keys and values of sources [B, N], for every decoder layer."""
        self.require_room(source.shape[1])
        given = {"source": source.numpy(), "source_lengths": lengths.numpy()}
        return run_graph(self.encoder, given)

    def begin(self, source: list[Tensor], source_lengths: Tensor) -> OnnxState:
        """A state that has written nothing."""
        return OnnxState(source_lengths, source)

    def step(self, ids: Tensor, state: OnnxState) -> Tensor:
        """Write ids [B * K], one a hypothesis; logits [B * K, V] of what comes next."""
        tokens = ids.view(len(state.lengths), -1)
        past = state.past or [tokens.new_empty(*tokens.shape, *empty(shape)).float() for shape in self.past_shapes]
        self.require_room(past[0].shape[3] + 1)
        given = [tokens, state.lengths, *state.source, *past]
        fed = {name: tensor.numpy() for name, tensor in zip(self.inputs, given, strict=True)}
        logits, *state.past = run_graph(self.decoder, fed)
        return logits.flatten(0, 1)

    def require_room(self, length: int) -> None:
        if length > self.positions:
            raise ArgumentError(
                f"a sequence of {length} tokens, but the graphs were exported for {self.positions}; "
                "shorten the line, or lower extra_length"
            )

    def sites(self, *_: Any, **__: Any) -> NoReturn:
        """None: weights of attention stay inside the graphs."""
        raise ArgumentError(
            "exported graphs translate, and show nothing of what is inside; use the run folder for that"
        )

    forward = decode = memories = sites
    config = property(sites)


def empty(shape: Sequence[Any]) -> tuple[int, int, int]:
    """Heads, no position yet, and size, of a past [batch, beam, heads, written, size]."""
    return int(shape[2]), 0, int(shape[4])


def require_pair(folder: Path, encoder: Any, decoder: Any, targets: int) -> None:
    """CheckpointError where the two graphs are not those of one export with this many target subwords."""
    reads = {"source": 2, "source_lengths": 1}
    sizes = {each.name: each.shape[1::2] for each in encoder.get_outputs()}  # heads and size
    pasts = {name.replace("source_", "past_"): shape for name, shape in sizes.items()}
    given = {each.name: each.shape for each in decoder.get_inputs()}
    made = [(each.name, each.shape[-1]) for each in decoder.get_outputs()]
    presents = [(name.replace("source_", "present_"), shape[-1]) for name, shape in sizes.items()]
    if {each.name: len(each.shape) for each in encoder.get_inputs()} != reads or not sizes:
        raise damaged(folder / "encoder.onnx", "it does not read sources")
    if (
        list(given) != ["tokens", "source_lengths", *sizes, *pasts]
        or any(given[name][1::2] != shape for name, shape in sizes.items())
        or any(given[name][2::2] != shape for name, shape in pasts.items())
        or made != [("logits", targets), *presents]
    ):
        raise damaged(folder / "decoder.onnx", "it is not the decoder of encoder.onnx and of target.model")


def run_graph(graph: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """What a graph makes of its inputs; CheckpointError where onnxruntime cannot say."""
    try:
        return [torch.from_numpy(array) for array in graph.run(None, given)]
    except Exception as error:  # onnxruntime has a class of its own for every reason
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"onnxruntime cannot run the exported graphs: {reason}; export the run again") from error


def open_graph(path: Path, threads: int | None) -> Any:
    """An onnxruntime session on the CPU; CheckpointError where it is no graph."""
    # Otherwise onnxruntime >= 1.29 writes an id and a database below the home folder when imported, and sends events.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.log_severity_level = 3
    # Its threads would otherwise spin while torch chooses tokens, and take the cores from it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for every reason
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"onnxruntime cannot read {path}: {reason}") from error
