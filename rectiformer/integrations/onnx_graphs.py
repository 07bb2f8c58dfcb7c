"""A Transformer as two ONNX graphs: one reads a source, the other writes a token a hypothesis.

Attention is the reference's formula, so the graphs hold ONNX's own operators only. Batch, beam and lengths are free.

    encoder: source [batch, source_length], source_lengths [batch]
             -> source_keys.i, source_values.i [batch, heads, source_length, size] of every decoder layer i
    decoder: tokens [batch, beam], source_lengths, source_keys.i, source_values.i,
             past_keys.i, past_values.i [batch, beam, heads, written, size], `written` being 0 at first
             -> logits [batch, beam, vocabulary], present_keys.i, present_values.i with one position more
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rectiformer.errors import ArgumentError
from rectiformer.files import write_file
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import ContextCache
from rectiformer.model.layers import DecoderLayer, EncoderLayer
from rectiformer.model.transformer import Transformer
from rectiformer.ops.attention import attention

OPSET = 20
LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights that still fit into one protobuf message; those of larger graphs lie in a file beside it."""

Axes = Mapping[int, Any]


class EncoderGraph(nn.Module):
    """What a decoder needs of a source: keys and values of every layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_lengths: Tensor) -> list[Tensor]:
        """The source keys and values of each layer, in turns."""
        x, seen = self.model.source_embedding(source), visible(source, source_lengths)
        for layer in self.model.encoder:
            assert isinstance(layer, EncoderLayer)
            x = layer.around_attention(x, lambda x, own=layer.attention: attend(own, seen, x, None, source_lengths))
            x = layer.around_memory(x, layer.memory)
        pairs = self.model.project_source(self.model.encoder_norm(x), source_lengths)
        return [part for pair in pairs for part in pair]


class DecoderGraph(nn.Module):
    """One step of every hypothesis of every sentence."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, source_lengths: Tensor, source: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of what comes next, and the past with these tokens."""
        written, present = past[0].shape[3], []
        embedding = self.model.target_embedding
        x = embedding.embed(tokens.flatten()[:, None], embedding.positions[torch.full((1,), written)])
        seen = visible(source[0][:, 0, :, 0], source_lengths)
        for index, layer in enumerate(self.model.decoder):
            assert isinstance(layer, DecoderLayer)
            pair = slice(2 * index, 2 * index + 2)
            own, other = JoinedCache(*past[pair]), ContextCache(*source[pair])
            x = layer.around_attention(x, lambda x, layer=layer, own=own: attend(layer.attention, None, x, own))
            x = layer.around_cross(
                x.view(*tokens.shape, -1), lambda x, layer=layer, other=other: attend(layer.cross, seen, x, other)
            ).view(x.shape)
            x = layer.around_memory(x, layer.memory)
            present += [held.unflatten(0, tokens.shape) for held in (own.keys, own.values)]
        return self.model.logits(self.model.decoder_norm(x)).view(*tokens.shape, -1), present


class JoinedCache:
    """Keys and values [batch, beam, heads, written, size] of earlier steps, to which new ones are joined in a copy."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys.flatten(0, 1), values.flatten(0, 1)
        self.length = keys.shape[3]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        return self.keys, self.values


def visible(rows: Tensor, lengths: Tensor) -> Tensor:
    """True where rows [batch, length] hold what is real: [batch, 1, 1, length]."""
    return (torch.arange(rows.shape[1]) < lengths[:, None])[:, None, None]


def attend(
    module: RectifiedAttention,
    seen: Tensor | None,
    x: Tensor,
    cache: JoinedCache | ContextCache | None,
    lengths: Tensor | None = None,
) -> Tensor:
    """`module(x)` by the reference's formula: custom operators of torch have no counterpart in ONNX."""
    memory = x if isinstance(cache, ContextCache) else None
    q, k, v = module.project(x, memory, cache, lengths)
    mixed = attention(q, k, v, module.variant, attn_mask=seen, backend="reference", **module.current_options())
    return module.output(module.norm(mixed.transpose(1, 2).flatten(2)))


def write_graphs(model: Transformer, folder: Path, positions: int) -> None:
    """Write encoder.onnx and decoder.onnx, for sequences of up to `positions` tokens."""
    for embedding in (model.source_embedding, model.target_embedding):
        embedding.reserve(positions)
        embedding.positions = embedding.positions[:positions].clone()
    batch, beam = (torch.export.Dim(name, min=1, max=2**16) for name in ("batch", "beam"))
    length, written = (torch.export.Dim(name, max=positions) for name in ("source_length", "written"))
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
            "past": [{0: batch, 1: beam, 3: written}] * len(past),
        }
        outputs = ["logits", *name_pairs("present", layers)]
        write_graph(DecoderGraph(model), arguments, axes, outputs, folder / "decoder.onnx")


def name_pairs(what: str, layers: range) -> list[str]:
    return [f"{what}_{part}.{layer}" for layer in layers for part in ("keys", "values")]


def write_graph(
    graph: EncoderGraph | DecoderGraph,
    arguments: dict[str, Any],
    axes: dict[str, Any],
    outputs: Sequence[str],
    path: Path,
) -> None:
    """Trace, translate and write one graph; ArgumentError where a variant or memory has no counterpart in ONNX."""
    layers = range(len(outputs) // 2)
    inputs = [
        name
        for key, given in arguments.items()
        for name in ([key] if isinstance(given, Tensor) else name_pairs(key, layers))
    ]
    try:
        with quiet():
            traced = torch.export.export(graph.eval(), (), arguments, dynamic_shapes=axes)
            # onnxscript's optimizer takes the 1e-8 of a norm for 0, and drops it; onnxruntime optimizes on its own.
            program = torch.onnx.export(
                traced, dynamo=True, opset_version=OPSET, input_names=inputs, output_names=outputs, verbose=False,
                optimize=False,
            )  # fmt: skip
            assert program is not None
            name_axes(program, axes)
            clear_places(program.model)
            size = sum(parameter.nbytes for parameter in graph.parameters())
            if size > LARGEST_FILE:
                program.save(path, external_data=True)
            else:
                write_file(path, program.model_proto.SerializeToString())
    except OSError:
        raise
    except Exception as error:
        config = graph.model.config
        kinds = {config.variant_of(kind) for kind in ("encoder", "decoder", "cross")}
        raise ArgumentError(
            f"{path.stem}: torch cannot make ONNX of attention {', '.join(sorted(kinds))} with memory {config.memory} "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
        ) from error


def name_axes(program: Any, axes: dict[str, Any]) -> None:
    """Call the free axes by their names instead of torch's numbers."""
    rows = [row for given in axes.values() for row in (given if isinstance(given, list) else [given])]
    found = {
        value.shape[axis].value: dimension.__name__
        for value, row in zip(program.model.graph.inputs, rows, strict=True)
        for axis, dimension in row.items()
    }
    program.rename_axes(found)


def clear_places(model: Any) -> None:
    """Forget where in whose file system each node came from."""
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
    """Without torch's remarks about itself and about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
