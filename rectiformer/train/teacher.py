"""The model that another one learns from, and the calls of its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.imitation import ModuleCall
from rectiformer.model.transformer import Site, Transformer
from rectiformer.runs.folder import Run, load_model, open_run, require_same_vocabularies


class SiteCall(NamedTuple):
    """One call of a teacher's attention."""

    inputs: tuple[Tensor, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, call: ModuleCall) -> SiteCall:
        return cls(call.inputs, call.keywords)

    def project(self, module: RectifiedAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of any attention for these inputs."""
        x, *context = self.inputs
        rotary = {name: value for name, value in self.keywords.items() if name == "rotary"}
        return module.project(x, context[0] if context else None, None, self.keywords.get("key_lengths"), **rotary)

    @property
    def rotated(self) -> bool:
        """Whether positions of sentences rotate queries or keys, so that their basis cannot be changed."""
        return any(part is not None for part in self.keywords.get("rotary", ()))

    @property
    def visibility(self) -> dict[str, Any]:
        """Which keys each query saw, as `attention` takes it."""
        return {name: value for name, value in self.keywords.items() if name in ("causal", "key_lengths")}


class SitePair(NamedTuple):
    """The attention of a student and of its teacher at the same place."""

    student: Site
    teacher: Site


def require_teacher(config: Config) -> Run:
    """The run to learn from; ConfigError where `config` cannot learn from it."""
    name = config.distillation.teacher
    run = open_run(Path(name))
    for key in ("hidden_size", "num_heads", "encoder_layers", "decoder_layers", "positions"):
        ours, theirs = getattr(config.model, key), getattr(run.config.model, key)
        if ours != theirs:
            raise ConfigError(
                f"model.{key} = {ours!r}, but it is {theirs!r} in {name}, the teacher; each attention learns from the "
                "one at its place, so make them the same"
            )
    taken = {
        "data.stream = true": config.data.stream,
        'training.parallel = "fsdp"': config.training.parallel == "fsdp",
        "training.init_from": config.training.init_from,
    }
    for setting in [setting for setting, is_set in taken.items() if is_set]:
        raise ConfigError(f"{setting} cannot be combined with distillation.teacher; leave one of them out")
    return run


def load_teacher(run: Run, device: torch.device) -> Transformer:
    """The model that `run` learns from, on `device`, without gradients."""
    start = require_teacher(run.config)
    require_same_vocabularies(start, run.source, run.target)
    step = run.config.distillation.teacher_step
    model, _ = load_model(start, str(step) if step else "best", device)
    return model.requires_grad_(False)


def differing(student: Transformer, teacher: Transformer) -> list[SitePair]:
    """The attention sites at which student and teacher have different variants."""
    pairs = map(SitePair, student.sites(), teacher.sites())
    return [pair for pair in pairs if pair.student.attention.variant != pair.teacher.attention.variant]


def attentions(model: Transformer) -> list[RectifiedAttention]:
    """Every attention, encoder first."""
    return [site.attention for site in model.sites()]


def real_queries(site: Site, source_lengths: Tensor, target_lengths: Tensor, size: int) -> Tensor:
    """Which of `size` queries at this site are no padding: [B, size]."""
    lengths = source_lengths if site.kind == "encoder" else target_lengths
    return torch.arange(size, device=lengths.device) < lengths[:, None]
