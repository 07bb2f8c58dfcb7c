"""ONNX: a translator as two graphs that onnxruntime runs anywhere, and a translator that reads them back.

    export_onnx(Translator.from_run("runs/tiny", device="cpu"), Path("tiny-onnx"))
    OnnxTranslator("tiny-onnx").translate(["Der Hund schläft."], SearchOptions())

Attention is the reference's formula, so the graphs contain ONNX's own operators only. Batch, beam and lengths are free.
docs/export.md lists the inputs and outputs of both graphs.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import damaged, write_file
from rectiformer.integrations.export import SITES, Report, export_folder, read_record, require_packages
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import KeyValueCache
from rectiformer.model.layers import DecoderLayer, EncoderLayer
from rectiformer.model.transformer import Encoded, Transformer
from rectiformer.ops.attention import attention
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator

SHAPES = ((1, 1, 1, 1), (2, 4, 2, 12), (3, 2, 20, 30))
"""Batch, beam, steps and source length at which graphs are compared with the model they come from."""
CLOSE = 1e-3
"""Of the largest logit: far more than rounding, far less than a wrong operator."""
OPSET = 20
MAX_PROTOBUF = 2**31 - 2**24
"""Bytes of weights that still fit into one protobuf message; larger graphs keep them in a second file."""


def export_onnx(translator: Translator, out: Path, report: Report = lambda line: None) -> None:
    """Write folder `out` with encoder.onnx, decoder.onnx, source.model, target.model and export.json.

    The graphs are compared with the model before the folder appears; what ONNX cannot express is an ArgumentError. They
    accept sequences of up to twice `translator.max_length` tokens.
    """
    require_packages("ONNX", "onnx", "onnx", "onnxscript", "onnxruntime")
    model, positions = translator.model.eval(), 2 * translator.max_length
    with export_folder(translator, out, "onnx", positions=positions) as folder:
        if (found := (model.output.dtype, model.output.device.type)) != (torch.float32, "cpu"):
            raise ArgumentError(f"the model is {found[0]} on {model.output.device}; load it as fp32 on the cpu")
        report("translating the model into graphs")
        write_graphs(model, folder, positions)
        report("comparing the graphs with the model")
        graphs = OnnxTransformer(folder, translator.source.size, translator.target.size, positions)
        check_graphs(model, graphs)
        report("writing vocabularies and hashes")
        translator.source.save(folder / "source.model")
        translator.target.save(folder / "target.model")


def check_graphs(model: Transformer, graphs: OnnxTransformer) -> None:
    """Raise an ArgumentError if the logits of graphs and model differ, at any step of random sentences."""
    generator = torch.Generator().manual_seed(1)

    def draw(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    with torch.inference_mode():
        for batch, beam, steps, length in SHAPES:
            source = draw(len(model.source_embedding.table), batch, length)
            lengths = 1 + draw(length, batch)
            state = model.begin(model.encode(source, lengths))
            other = graphs.begin(graphs.encode(source, lengths))
            for step in range(steps):
                tokens = draw(len(model.output), batch * beam)
                right, found = model.step(tokens, state), graphs.step(tokens, other)
                error = (found - right).abs().max() / right.abs().max()
                if not error <= CLOSE:
                    raise ArgumentError(
                        f"the graphs differ from the model: with batch {batch}, beam {beam}, source length {length} "
                        f"their logits at step {step} are off by {error:.1e} of the largest; nothing was written"
                    )


class OnnxTranslator(Translator):
    """The translator of a folder written by `export_onnx`: the same beam search, with the model run by onnxruntime.

    It translates and samples; scores, alignments and heads need the run folder.

    Args:
        threads: how many onnxruntime may use; by default as many as torch uses.
    """

    def __init__(self, folder: str | Path, *, threads: int | None = None) -> None:
        require_packages("ONNX", "onnx", "onnxruntime")
        folder = Path(folder)
        record = read_record(folder, "onnx")
        try:
            source = Vocabulary.load(folder / "source.model", record["source"]["sha256"])
            target = Vocabulary.load(folder / "target.model", record["target"]["sha256"])
            names = ("positions", "max_length", "segment_length")
            positions, max_length, segment_length = (int(record[name]) for name in names)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(folder / "export.json", f"it does not describe a translator ({error!r})") from error
        graphs = OnnxTransformer(folder, source.size, target.size, positions, threads)
        # Beam search needs less of a model than a Transformer has: what OnnxTransformer has.
        super().__init__(
            cast(Transformer, graphs), source, target, max_length=max_length, segment_length=segment_length
        )
        self.origin = str(record.get("fingerprint"))

    def fingerprint(self) -> str:
        """The fingerprint of the translator that was exported."""
        return self.origin


@dataclass
class OnnxState:
    """The state of decoding: what the decoder's graph is given besides tokens."""

    lengths: Tensor  # [B]
    source: list[Tensor]  # [B, H, N, D] each
    past: list[Tensor] = field(default_factory=list)  # [B, K, H, T, D] each

    def reorder(self, rows: Tensor) -> None:
        """Let hypothesis r continue hypothesis rows[r]."""
        self.past = [held.flatten(0, 1).index_select(0, rows).view(held.shape) for held in self.past]

    def keep(self, sentences: Tensor, beam: int) -> None:
        """Continue with these sentences only."""
        self.lengths = self.lengths[sentences]
        self.source = [held.index_select(0, sentences) for held in self.source]
        self.past = [held.index_select(0, sentences) for held in self.past]


class OnnxTransformer(nn.Module):
    """Two graphs behind the methods of a `Transformer` that beam search calls."""

    def __init__(self, folder: Path, sources: int, targets: int, positions: int, threads: int | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder = (open_graph(folder / f"{name}.onnx", threads) for name in ("encoder", "decoder"))
        require_pair(folder, self.encoder, self.decoder, targets)
        self.inputs = [each.name for each in self.decoder.get_inputs()]
        pasts = [each.shape for each in self.decoder.get_inputs() if each.name.startswith("past_")]
        self.empty_pasts = [(heads, 0, size) for _, _, heads, _, size in pasts]
        self.positions = positions
        # Beam search reads only the shape and device of these two.
        self.source_embedding = SimpleNamespace(table=torch.empty(sources, 0))
        self.output = torch.empty(targets, 0)
        self.eval()

    def encode(self, source: Tensor, lengths: Tensor) -> OnnxState:
        """The state before the first token: keys and values of sources [B, N] for every decoder layer."""
        self.require_positions(source.shape[1])
        given = {"source": source.numpy(), "source_lengths": lengths.numpy()}
        return OnnxState(lengths, run_graph(self.encoder, given))

    def begin(self, context: OnnxState) -> OnnxState:
        """The state before the first token, which `encode` returned."""
        return context

    def step(self, ids: Tensor, state: OnnxState) -> Tensor:
        """Append ids [B * K], one per hypothesis; logits [B * K, V] of the next token."""
        tokens = ids.view(len(state.lengths), -1)
        past = state.past or [torch.empty(*tokens.shape, *empty) for empty in self.empty_pasts]
        self.require_positions(past[0].shape[3] + 1)
        given = [tokens, state.lengths, *state.source, *past]
        fed = {name: tensor.numpy() for name, tensor in zip(self.inputs, given, strict=True)}
        logits, *state.past = run_graph(self.decoder, fed)
        return logits.flatten(0, 1)

    def require_positions(self, length: int) -> None:
        if length > self.positions:
            raise ArgumentError(
                f"a sequence of {length} tokens, but the graphs were exported for {self.positions}; "
                "shorten the line, or lower extra_length"
            )

    def sites(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: attention weights stay inside the graphs."""
        raise ArgumentError("exported graphs translate and show nothing of their inside; use the run folder for that")

    forward = decode = memories = sites
    config = property(sites)


def require_pair(folder: Path, encoder: Any, decoder: Any, targets: int) -> None:
    """Raise a CheckpointError unless the graphs are from one export with this many target subwords."""
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
    """The outputs of a graph; CheckpointError if onnxruntime fails."""
    try:
        return [torch.from_numpy(array) for array in graph.run(None, given)]
    except Exception as error:  # onnxruntime has an exception class for every reason
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"onnxruntime cannot run the exported graphs: {reason}; export the run again") from error


def open_graph(path: Path, threads: int | None) -> Any:
    """An onnxruntime session on the CPU; CheckpointError if the file is not a graph."""
    # Otherwise onnxruntime >= 1.29 writes an id and a database below the home folder when imported, and sends events.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.log_severity_level = 3
    # Otherwise its threads would spin while torch chooses tokens, and take the cores from torch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for every reason
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"onnxruntime cannot read {path}: {reason}") from error


class Graph(nn.Module):
    """A part of a model that becomes one graph."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model


class EncoderGraph(Graph):
    """Reads a source: the keys and values that every decoder layer needs of it."""

    def forward(self, source: Tensor, source_lengths: Tensor) -> list[Tensor]:
        """Keys and values of each layer, alternating."""
        x, seen = self.model.source_embedding(source), visible(source, source_lengths)
        for layer in self.model.encoder:
            assert isinstance(layer, EncoderLayer)
            x = layer.around_attention(x, lambda x, own=layer.attention: attend(own, seen, x, None, source_lengths))
            x = layer.around_memory(x, layer.memory)
        pairs = self.model.project_context(Encoded(self.model.encoder_norm(x), source_lengths))
        return [part for pair in pairs for part in pair]


class DecoderGraph(Graph):
    """One step of every hypothesis of every sentence."""

    def forward(
        self, tokens: Tensor, source_lengths: Tensor, source: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the next token, and the past with these tokens appended."""
        past_length, present = past[0].shape[3], []
        embedding = self.model.target_embedding
        x = embedding.embed(tokens.flatten()[:, None], embedding.positions[torch.full((1,), past_length)])
        seen = visible(source[0][:, 0, :, 0], source_lengths)
        for index, layer in enumerate(self.model.decoder):
            assert isinstance(layer, DecoderLayer)
            pair = slice(2 * index, 2 * index + 2)
            own, other = JoinedCache(*past[pair]), KeyValueCache(*source[pair])
            x = layer.around_attention(x, lambda x, layer=layer, own=own: attend(layer.attention, None, x, own))
            x = layer.around_cross(
                x.view(*tokens.shape, -1), lambda x, layer=layer, other=other: attend(layer.cross, seen, x, other)
            ).view(x.shape)
            x = layer.around_memory(x, layer.memory)
            present += [held.unflatten(0, tokens.shape) for held in (own.keys, own.values)]
        return self.model.logits(self.model.decoder_norm(x)).view(*tokens.shape, -1), present


class JoinedCache(KeyValueCache):
    """Keys and values [batch, beam, heads, past_length, size] of earlier steps; new ones are appended to a copy."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys.flatten(0, 1), values.flatten(0, 1))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        return self.keys, self.values


def visible(rows: Tensor, lengths: Tensor) -> Tensor:
    """True where rows [batch, length] are not padding: [batch, 1, 1, length]."""
    return (torch.arange(rows.shape[1]) < lengths[:, None])[:, None, None]


def attend(
    module: RectifiedAttention,
    seen: Tensor | None,
    x: Tensor,
    cache: KeyValueCache | None,
    lengths: Tensor | None = None,
) -> Tensor:
    """`module(x)` by the reference's formula: torch's custom operators have no counterpart in ONNX."""
    context = None if cache is None or isinstance(cache, JoinedCache) else x
    q, k, v = module.project(x, context, cache, lengths)
    mixed = attention(q, k, v, module.variant, attn_mask=seen, backend="reference", **module.current_options())
    return module.combine_heads(mixed, x)


def write_graphs(model: Transformer, folder: Path, positions: int) -> None:
    """Write encoder.onnx and decoder.onnx, for sequences of up to `positions` tokens."""
    for embedding in (model.source_embedding, model.target_embedding):
        embedding.reserve(positions)
        embedding.positions = embedding.positions[:positions].clone()
    batch, beam = (torch.export.Dim(name, min=1, max=2**16) for name in ("batch", "beam"))
    length, past_length = (torch.export.Dim(name, max=positions) for name in ("source_length", "past_length"))
    ids, lengths = torch.ones(3, 5, dtype=torch.long), torch.tensor([5, 4, 2])
    encoder, layers = EncoderGraph(model), range(len(model.decoder))
    with torch.no_grad():
        source = encoder(ids, lengths)
        past = [torch.zeros(3, 2, each.shape[1], 7, each.shape[3]) for each in source]
        arguments: dict[str, Any] = {"source": ids, "source_lengths": lengths}
        axes: dict[str, Any] = {"source": {0: batch, 1: length}, "source_lengths": {0: batch}}
        source_names = name_pairs("source", layers)
        write_graph(encoder, arguments, axes, source_names, folder / "encoder.onnx")
        arguments = {"tokens": ids[:, :2].contiguous(), "source_lengths": lengths, "source": source, "past": past}
        axes = {
            "tokens": {0: batch, 1: beam},
            "source_lengths": {0: batch},
            "source": [{0: batch, 2: length}] * len(source),
            "past": [{0: batch, 1: beam, 3: past_length}] * len(past),
        }
        outputs = ["logits", *name_pairs("present", layers)]
        write_graph(DecoderGraph(model), arguments, axes, outputs, folder / "decoder.onnx")


def name_pairs(what: str, layers: range) -> list[str]:
    return [f"{what}_{part}.{layer}" for layer in layers for part in ("keys", "values")]


def write_graph(
    graph: Graph, arguments: dict[str, Any], axes: dict[str, Any], outputs: Sequence[str], path: Path
) -> None:
    """Trace, translate and write one graph; ArgumentError if a variant or memory has no counterpart in ONNX."""
    layers = range(len(outputs) // 2)
    inputs = [
        name
        for key, given in arguments.items()
        for name in ([key] if isinstance(given, Tensor) else name_pairs(key, layers))
    ]
    try:
        with quiet():
            traced = torch.export.export(graph.eval(), (), arguments, dynamic_shapes=axes)
            # onnxscript's optimizer drops the 1e-8 of a norm as if it were 0; onnxruntime optimizes on its own.
            program = torch.onnx.export(
                traced, dynamo=True, opset_version=OPSET, input_names=inputs, output_names=outputs, verbose=False,
                optimize=False,
            )  # fmt: skip
            assert program is not None
            name_axes(program, axes)
            clear_source_paths(program.model)
            size = sum(parameter.nbytes for parameter in graph.parameters())
            if size > MAX_PROTOBUF:
                program.save(path, external_data=True)
            else:
                write_file(path, program.model_proto.SerializeToString())
    except OSError:
        raise
    except Exception as error:
        config = graph.model.config
        variants = {config.variant_at(site) for site in SITES}
        raise ArgumentError(
            f"{path.stem}: torch cannot make ONNX of attention {', '.join(sorted(variants))} "
            f"with memory {config.memory} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
        ) from error


def name_axes(program: Any, axes: dict[str, Any]) -> None:
    """Name the free axes, which torch numbers."""
    rows = [row for given in axes.values() for row in (given if isinstance(given, list) else [given])]
    found = {
        value.shape[axis].value: dimension.__name__
        for value, row in zip(program.model.graph.inputs, rows, strict=True)
        for axis, dimension in row.items()
    }
    program.rename_axes(found)


def clear_source_paths(model: Any) -> None:
    """Remove the paths of the source files that each node came from."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings about itself and about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
