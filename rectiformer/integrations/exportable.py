"""Which models other engines can run: the one table behind refusals, `export --help`, README.md and docs/export.md."""

from __future__ import annotations

from collections.abc import Iterator

from rectiformer.config import ModelConfig
from rectiformer.errors import ArgumentError
from rectiformer.model.layers import centers_keys, find_score_bias
from rectiformer.ops.variants import VARIANTS

FORMATS = ("onnx", "ctranslate2", "transformers")
ENGINES = {"onnx": "ONNX", "ctranslate2": "CTranslate2", "transformers": "MarianMT"}
NO_GRAPH = ("topk",)
"""Variants of which torch makes no ONNX graph."""
CAN_RUN = {
    "onnx": tuple(name for name in VARIANTS if name not in NO_GRAPH),
    "ctranslate2": ("softmax",),
    "transformers": ("softmax", "rela", "rela-i", "reluformer", "relu-seqlen"),
}
"""The variants that each engine has; Marian has those that `integrations.transformers.register` gives it."""
NORMS = {"onnx": ("post", "pre"), "ctranslate2": ("post",), "transformers": ("post",)}
"""Where LayerNorm may stand."""
KINDS = ("encoder", "decoder", "cross")


def require_exportable(config: ModelConfig, format: str) -> None:
    """ArgumentError that says why an engine cannot run such a model, and which ones can."""
    if reason := obstacle(config, format):
        others = [other for other in FORMATS if not obstacle(config, other)]
        advice = f"export it with --to {' or '.join(others)}" if others else "only rectiformer itself can run it"
        if centered(config) and not obstacle(config, format, center=False):
            advice += ', or train with model.center_keys = "no"'
        raise ArgumentError(f"{reason}; {advice}")


def obstacle(config: ModelConfig, format: str, center: bool = True) -> str:
    """Why an engine cannot run such a model; empty where it can. Without `center`, as if its keys were not centered."""
    engine = ENGINES[format]
    if config.positions != "sequence":
        return f"{engine} counts positions through, and this model has model.positions = {config.positions!r}"
    if config.norm not in NORMS[format]:
        return f"{engine} has no layers with model.norm = {config.norm!r}, only with {NORMS[format][0]!r}"
    if format != "onnx":
        for key, needed in (("memory", "relu"), ("output_norm", "")):
            if (value := getattr(config, key)) != needed:
                return f"{engine} has no layers with model.{key} = {value!r}, only with {needed!r}"
    return attention_obstacle(config, format, center)


def attention_obstacle(config: ModelConfig, format: str, center: bool) -> str:
    """The same of attention alone."""
    engine, variants = ENGINES[format], {kind: config.variant_of(kind) for kind in KINDS}
    for kind, variant in variants.items():
        if variant not in CAN_RUN[format]:
            known = f"all but {', '.join(NO_GRAPH)}" if format == "onnx" else ", ".join(CAN_RUN[format])
            return f"{engine} cannot compute the {kind} attention of this model, {variant!r}, only {known}"
    if format == "transformers":
        if len(set(variants.values())) > 1:
            return f"{engine} has one attention for all sites, this model {variants}"
        if center and centered(config):
            how = f"model.center_keys = {config.center_keys!r} does for {variants['cross']!r}"
            return f"{engine} cannot center keys, as {how}"
        if find_score_bias(config, variants["cross"]) is not None:
            return f"{engine} cannot add model.score_bias = {config.score_bias!r} to its scores"
    return ""


def centered(config: ModelConfig) -> bool:
    """Whether the model centers keys anywhere."""
    return any(centers_keys(config, kind) for kind in KINDS)


def table() -> Iterator[tuple[str, ...]]:
    """A row a variant: its name, and for each format the placements of LayerNorm with which it can be exported."""
    for variant in VARIANTS:
        yield variant, *(placements(variant, format) for format in FORMATS)


def placements(variant: str, format: str) -> str:
    """The values of model.norm, and of model.center_keys where the default is in the way; "no" where none will do."""
    configs = {norm: ModelConfig(variant=variant, norm=norm) for norm in ("post", "pre")}
    if fit := [norm for norm, config in configs.items() if not obstacle(config, format)]:
        return ", ".join(fit)
    if fit := [norm for norm, config in configs.items() if not obstacle(config, format, center=False)]:
        return f'{", ".join(fit)}, with `center_keys = "no"`'
    return "no"


def summarize(format: str) -> str:
    """One line on what a format takes."""
    rest = [name for name in VARIANTS if name not in CAN_RUN[format]]
    named = (name + ' (center_keys = "no")' * ("center" in placements(name, format)) for name in CAN_RUN[format])
    taken = f"every variant but {', '.join(rest)}" if len(rest) < len(CAN_RUN[format]) else ", ".join(named)
    return f"{taken}; norm {' or '.join(NORMS[format])}"
