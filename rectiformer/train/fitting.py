"""The start of a student: its teacher's weights, and what brings each head's output nearest to the teacher's.

All of it is folded into weights that the model has anyway. A softmax ignores what all scores of a row have in common,
so that may be taken out of the keys, and any change of basis that queries and keys share leaves scores as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.imitation import recording
from rectiformer.model.norms import HeadRMSNorm, RMSNorm
from rectiformer.model.transformer import Transformer
from rectiformer.ops.attention import attention
from rectiformer.runs.folder import weights_of
from rectiformer.text.batches import Batch, BatchPlan
from rectiformer.train.teacher import SiteCall, attentions, differing, real_queries

SCALES = tuple(2 ** (power / 2) for power in range(-2, 6))
"""Factors of a head's scores that are tried: rectified heads are less sharp than a softmax of the same scores."""
BIASES = (0.0, -4.0, -2.0, -1.0, 1.0)
"""What is tried to be added to a head's scores, where the model has a bias that can hold it."""
CALIBRATION = 3_000
"""Target tokens to fit on."""
Calls = Sequence[tuple[SiteCall, Tensor]]
"""The teacher's calls at one place, each with the queries [B, M] that are real."""


def calibration_batches(plan: BatchPlan, device: torch.device) -> list[Batch]:
    """The first rows of the first batches, `CALIBRATION` target tokens in all."""
    found: list[Batch] = []
    while sum(batch.tokens for batch in found) < CALIBRATION and len(found) < CALIBRATION:
        batch = plan.batch(len(found))
        rows = slice(max(1, CALIBRATION // (2 * batch.target.shape[1])))
        tensors: dict[str, Any] = {name: part[rows] for name, part in vars(batch).items() if isinstance(part, Tensor)}
        cut = replace(batch, pairs=batch.pairs[rows], **tensors)
        found.append(replace(cut, tokens=int(cut.target_lengths.sum())).to(device))
    return found


@torch.no_grad()
def inherit(student: Transformer, teacher: Transformer) -> None:
    """Give the student every weight of the teacher that it has too."""
    own = weights_of(student)
    for name, tensor in weights_of(teacher).items():
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)


@torch.no_grad()
def fit_student(student: Transformer, teacher: Transformer, batches: Sequence[Batch]) -> None:
    """Give the student the teacher's weights, and fit its heads on some text: scale and bias of their scores, the size
    of their values, and the gains of an output norm."""
    inherit(student, teacher)
    pairs = differing(student, teacher)
    calls: list[list[tuple[SiteCall, Tensor]]] = [[] for _ in pairs]
    with recording(attentions(teacher)) as latest:
        for batch in batches:
            teacher(batch.source, batch.source_lengths, batch.target_input)
            for found, (ours, theirs) in zip(calls, pairs, strict=True):
                call = latest[theirs.attention]
                size = call.output.shape[1]
                found.append((SiteCall.of(call), real_queries(ours, batch.source_lengths, batch.target_lengths, size)))
    for found, (ours, theirs) in zip(calls, pairs, strict=True):
        fit_site(ours.attention, theirs.attention, found)


def fit_site(student: RectifiedAttention, teacher: RectifiedAttention, calls: Calls) -> None:
    """Fit one attention, which has its teacher's projections."""
    queries, keys = project_all(teacher, calls)
    if not student.center_keys:
        bias = student.input_bias
        if bias is not None:
            _, held, _ = bias.split(student.qkv_sizes)
            held -= keys.mean(1).flatten()
        keys = keys - keys.mean(1, keepdim=True)
    if student.score_bias is not None:
        if not any(call.rotated for call, _ in calls):
            rotate_heads(student, queries, keys)
        student.score_bias.reset(student.input_weight)
    fit_scores(student, teacher, calls)
    fit_gains(student, teacher, calls)


def project_all(module: RectifiedAttention, calls: Calls) -> tuple[Tensor, Tensor]:
    """All real queries and keys of some calls, [H, n, D] each."""
    queries, keys = [], []
    for call, real in calls:
        q, k, _ = call.project(module)
        lengths = call.keywords.get("key_lengths")  # of a decoder's own keys there are none: they are its queries
        seen = real if lengths is None else torch.arange(k.shape[2], device=k.device) < lengths[:, None]
        queries.append(q.transpose(1, 2)[real])
        keys.append(k.transpose(1, 2)[seen])
    return torch.cat(queries).transpose(0, 1).double(), torch.cat(keys).transpose(0, 1).double()


def rotate_heads(module: RectifiedAttention, queries: Tensor, keys: Tensor) -> None:
    """Change the basis of queries and keys of each head, scores left as they are, so that the first dimension, which
    the score bias takes, is the one that counts least for the scores of these queries and keys [H, n, D].
    """
    keys = keys - keys.mean(1, keepdim=True)
    sizes = zip(queries, keys, strict=True)
    weight, bias = module.input_weight, module.input_bias
    D, E = queries.shape[2], module.embed_dim
    for head, (q, k) in enumerate(sizes):
        of_q, of_k = (torch.linalg.qr(x + 1e-6 * x.std() * torch.randn_like(x)).R for x in (q, k))
        U, S, Vh = torch.linalg.svd(of_q @ of_k.mT)
        order = torch.cat([S.new_tensor([D - 1], dtype=torch.long), torch.arange(D - 1, device=S.device)])
        # With q of_q^-1 and k of_k^-1 orthonormal, these bases give both the same share of each singular value.
        change_q = torch.linalg.solve_triangular(of_q, U * S.sqrt(), upper=True)[:, order]  # q' = q @ change_q
        change_k = torch.linalg.solve_triangular(of_k, Vh.mT * S.sqrt(), upper=True)[:, order]
        for change, first in ((change_q, 0), (change_k, E)):
            rows = slice(first + head * D, first + (head + 1) * D)
            weight[rows] = (change.mT @ weight[rows].double()).to(weight.dtype)
            if bias is not None:
                bias[rows] = (change.mT @ bias[rows].double()).to(bias.dtype)


def fit_scores(student: RectifiedAttention, teacher: RectifiedAttention, calls: Calls) -> None:
    """Give each head the scale and bias of its scores with which its output, times a factor, is nearest to the
    teacher's; and that factor to its values."""
    heads, held = student.num_heads, student.score_bias is not None
    targets = [mixed_by(teacher, call.project(teacher), call) for call, _ in calls]
    projected = [call.project(student) for call, _ in calls]
    least = torch.full((heads,), torch.inf, device=student.input_weight.device, dtype=torch.float64)
    chosen = [torch.ones_like(least), torch.zeros_like(least), torch.ones_like(least)]  # scale, bias, factor
    for scale, bias in product(SCALES, BIASES if held else BIASES[:1]):
        ours, both, theirs = (torch.zeros_like(least) for _ in range(3))
        for (q, k, v), target, (call, real) in zip(projected, targets, calls, strict=True):
            tried = torch.cat([q[..., :1] + bias, q[..., 1:] * scale], -1) if held else q * scale
            mixed = mixed_by(student, (tried, k, v), call)
            x, y = (each.transpose(1, 2)[real].double() for each in (mixed, target))  # [n, H, D]
            ours += x.square().sum((0, 2))
            both += (x * y).sum((0, 2))
            theirs += y.square().sum((0, 2))
        factor = torch.where(ours > 0, both / ours.clamp_min(1e-30), 1)
        error = theirs - both.square() / ours.clamp_min(1e-30)
        better = error < least
        least = torch.where(better, error, least)
        tried_here = torch.full_like(least, scale), torch.full_like(least, bias), factor
        chosen = [torch.where(better, new, old) for new, old in zip(tried_here, chosen, strict=True)]
    fold_scores(student, *chosen)


def mixed_by(module: RectifiedAttention, projected: tuple[Tensor, Tensor, Tensor], call: SiteCall) -> Tensor:
    """The values [B, H, M, D] that projected queries see, mixed as this attention weighs them."""
    q, k, v = projected
    return attention(q, k, v, module.variant, **call.visibility, **module.current_options())


def fold_scores(module: RectifiedAttention, scale: Tensor, bias: Tensor, factor: Tensor) -> None:
    """Multiply scores and values of each head by its numbers [H] and add to its scores, in the projections."""
    D, E = module.embed_dim // module.num_heads, module.embed_dim
    rows = scale[:, None].repeat(1, D)
    if module.score_bias is not None:
        rows[:, 0] = 1
    both = torch.cat([rows.flatten(), rows.new_ones(E), factor.repeat_interleave(D)])
    module.input_weight.mul_(both[:, None])
    if module.input_bias is not None:
        module.input_bias.mul_(both)
        if module.score_bias is not None:
            gain = module.score_scales().double() if module.scales_scores else 1.0
            module.input_bias[:E:D] += (bias / gain).to(module.input_bias.dtype)


def fit_gains(student: RectifiedAttention, teacher: RectifiedAttention, calls: Calls) -> None:
    """Give a norm the gains with which its output is nearest to what the teacher's heads mix."""
    if not isinstance(student.norm, RMSNorm | HeadRMSNorm):
        return
    student.norm.gain.fill_(1)
    both, ours = (
        torch.zeros(student.embed_dim, dtype=torch.float64, device=student.norm.gain.device) for _ in range(2)
    )
    for call, real in calls:
        x, y = (
            mixed_by(module, call.project(module), call).transpose(1, 2).flatten(2)[real]
            for module in (student, teacher)
        )
        normed = student.norm(x).double()
        both += (normed * y).sum(0)
        ours += normed.square().sum(0)
    student.norm.gain.copy_(both / ours.clamp_min(1e-30))
