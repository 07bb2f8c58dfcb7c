"""THE table of attention variants. A variant is one row; everything that lists variants reads this table.

Rules that hold for every row, kept by `reference.py`: a hidden key weighs exactly 0, a row that sees no key is exactly
0, and n is the number of keys *that row sees*.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError, unknown_name
from rectiformer.ops import activations
from rectiformer.ops.activations import (
    Pointwise,
    RowContext,
    RowScale,
    RowShift,
    Value,
    cosine_scores,
    dot_scores,
    softmax_weights,
    weighted_sum,
)
from rectiformer.ops.simplex import entmax15, sparsemax

BOUNDS: dict[str, Callable[[float], bool]] = {
    "a number above 0": lambda value: value > 0,
    "a number of at least 0": lambda value: value >= 0,
    "a number above 1": lambda value: value > 1,
    "a number from 0 to 1": lambda value: (value >= 0) & (value <= 1),
    "a whole number above 0": lambda value: value > 0 and value == int(value),
}


def is_finite(value: float) -> bool:
    """math.isfinite by comparisons, which torch.compile can follow where the number is symbolic."""
    return -math.inf < value < math.inf


@dataclass(frozen=True)
class Option:
    """A number that shapes a variant: given by the caller or, where `learn` names a transform, learned by a model."""

    default: float | int
    about: str
    needs: str
    """A key of `BOUNDS`."""
    learn: Literal["", "exp", "softplus", "sigmoid", "one-plus-sigmoid"] = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to attend."""

    name: str
    formula: str
    """Weight of one key, with x its score, n the keys its row sees, [.]+ = ReLU."""
    paper: str
    use: str
    """When to choose it, in one sentence."""
    weigh: Callable[[Tensor, RowContext], Tensor] | None = None
    """Scores to weights; None for pointwise rows, which `pointwise` and `row_scale` describe in full."""
    pointwise: Pointwise | None = None
    """For weights that are a function of their own score, times the `row_scale`: the kernels read it too."""
    rowwise: str = ""
    """For weights that are a function of their own score and of two numbers of their row, its threshold or normalizer:
    a key of `ROW_FUNCTIONS` in gpu/row_functions.py, by which the kernels compute what `weigh` defines."""
    row_scale: RowScale | None = None
    """A positive factor for a whole row. It is linear, so fast paths may apply it to the output."""
    scale: str = "none"
    """The row scale in words, for the tables."""
    output_norm: str = "none"
    """Name in model/norms.py of the norm over the concatenated heads, before the output projection."""
    center_keys: bool = False
    """Whether translators subtract from keys the mean of their sentence, unless configured otherwise."""
    learned_init: float = 0.0
    """Where the learned option of a translator starts, unless configured otherwise; 0: at its default."""
    options: Mapping[str, Option] = field(default_factory=dict)
    anneals: str = ""
    """The option by which the weights tend to those of a softmax as it grows, so that a training may lower it."""
    score: Callable[[Tensor, Tensor], Tensor] = dot_scores
    mix: Callable[[Tensor, Tensor, Tensor | None], Tensor] = weighted_sum
    hidden: float = 0.0
    """What a hidden key's weight becomes: 0, except where `mix` reads weights otherwise."""
    difference_of: str = ""
    """The variant w of weights w(q1, k1) - lam * w(q2, k2), whose views are the halves of queries and keys. Nothing
    computes such a row itself: it runs w for each view, wherever w runs, and subtracts. lam is one of its options."""

    @property
    def views(self) -> int:
        """Into how many views the head size is divided."""
        return 2 if self.difference_of else 1

    @property
    def power(self) -> int:
        """A rectified row's weights are [x]+ ** power times its `row_scale`. 0: not rectified."""
        row = self.pointwise
        plain = row is not None and row.function == "relu" and row.shift is None
        return row.power if row is not None and plain and isinstance(row.power, int) else 0

    @property
    def rectified(self) -> bool:
        return self.power > 0

    @property
    def opening(self) -> float | None:
        """What has to be added to small scores so that none of them closes a key; None where keys never close, or where
        the height of the threshold is an option."""
        row = self.pointwise
        if row is None or row.function != "relu" or (row.shift is not None and row.shift.unit != "1"):
            return None
        return float(self.power)

    @property
    def has_weights(self) -> bool:
        """Whether the output is a weighted sum of values, so that asking for the weights makes sense."""
        return self.mix is weighted_sum

    @property
    def implementations(self) -> tuple[str, ...]:
        if self.difference_of:
            return VARIANTS[self.difference_of].implementations
        products = ("products",) if self.score is dot_scores and self.mix is weighted_sum else ()
        sdpa = ("sdpa",) if self.name == "softmax" else ()
        fused = ("fused",) if self.pointwise is not None or self.rowwise or sdpa else ()
        return ("reference", *products, *(("blocked",) if self.pointwise is not None else ()), *sdpa, *fused)

    @cached_property
    def can_attend_to_nothing(self) -> bool:
        """Whether the weights of a row vanish, or turn negative, where all its scores are low: not on the simplex."""
        low, count = torch.tensor([[[[-1e3, -1e3]]]], device="cpu"), torch.tensor([[[[2.0]]]], device="cpu")
        return self.weights(low, RowContext(None, count, self.resolve_options({}))).sum().item() < 0.5

    def check_head_size(self, size: int) -> None:
        """ShapeError where queries and keys of this size cannot be divided into views."""
        if size % self.views:
            raise ShapeError(f"the head size is {size}, but variant {self.name!r} has two views and needs an even one")

    def weights(self, x: Tensor, rows: RowContext) -> Tensor:
        """Weights of a block of scores [B, H, M, N]; cells hidden in `rows` come out as anything finite."""
        weigh = self.pointwise or self.weigh
        assert weigh is not None
        weights = weigh(x, rows)
        return weights if self.row_scale is None else weights * self.row_scale(rows.count, rows.options)

    def resolve_options(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """Defaults overlaid with what the caller gave; unknown names and values out of range are refused.

        A tensor's values are read where that costs nothing: on the CPU, outside `torch.compile` and `torch.func`.
        Elsewhere nothing waits for them, and one out of range becomes NaN, as does all that it weighs.
        """
        resolved: dict[str, Value] = {name: option.default for name, option in self.options.items()}
        for name, value in given.items():
            if name not in self.options:
                if not self.options:
                    raise ArgumentError(f"variant {self.name!r} takes no options, but {name!r} was given")
                raise ArgumentError(unknown_name(f"option of variant {self.name!r}:", name, self.options))
            needs = self.options[name].needs
            if isinstance(value, Tensor):
                value = self._check_tensor(name, value)
            elif not (is_finite(value) and BOUNDS[needs](value)):
                raise ArgumentError(f"{name} = {value}, but variant {self.name!r} needs {needs}")
            resolved[name] = value
        return resolved

    def _check_tensor(self, name: str, value: Tensor) -> Tensor:
        """An option given as a tensor, whose values obey the same bound as a single number."""
        option = self.options[name]
        if not option.learn:
            raise ArgumentError(f"{name} is a tensor, but variant {self.name!r} needs {option.needs}; give a number")
        within: Any = BOUNDS[option.needs]
        fine = within(value) & (value < math.inf)
        if not is_readable(value):
            return torch.where(fine, value, math.nan)
        if not fine.all():
            found = value[~fine].flatten()[0].item()
            raise ArgumentError(f"{name} holds {found:g}, but variant {self.name!r} needs {option.needs}")
        return value


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be read, and without waiting for a device: not where torch traces or maps it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not wrapped(tensor)


def find_variant(name: str) -> Variant:
    """The row called `name`; an unknown name is refused with the nearest known ones."""
    if name not in VARIANTS:
        raise ArgumentError(unknown_name("variant", name, VARIANTS))
    return VARIANTS[name]


_EXPONENT = Option(1.0, "a in the row scale n^-a", "a number of at least 0")
_POWER = Option(2, "the power p", "a whole number above 0")
_THRESHOLD = {
    "beta": Option(1.0, "height of the threshold", "a number of at least 0", "softplus"),
    "power": _POWER,
}
_RELA = "Zhang, Titov, Sennrich 2021 (2104.07012)"

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in [
        Variant(
            name="softmax",
            formula="exp(x) / sum exp(x)",
            paper="Vaswani et al. 2017 (1706.03762)",
            use="The baseline of both papers.",
            weigh=softmax_weights,
        ),
        Variant(
            name="sparsemax",
            formula="[x - tau]+, sum 1",
            paper="Martins, Astudillo 2016 (1602.02068)",
            use="The sparsest baseline on the simplex; learns slowly.",
            weigh=lambda x, rows: sparsemax(x, rows.visible),
            rowwise="sparsemax",
        ),
        Variant(
            name="entmax15",
            formula="[x/2 - tau]+^2, sum 1",
            paper="Peters et al. 2019 (1905.05702)",
            use="A milder sparse baseline on the simplex, often the best of its family.",
            weigh=lambda x, rows: entmax15(x, rows.visible),
            rowwise="entmax15",
        ),
        Variant(
            name="entmax",
            formula="[(alpha-1) x - tau]+^(1/(alpha-1)), sum 1",
            paper="Correia et al. 2019 (1909.00015)",
            use="When each head should learn how sparse to be between softmax and sparsemax.",
            weigh=activations.entmax_weights,
            options={"alpha": Option(1.5, "1 is softmax, 2 is sparsemax", "a number above 1", "one-plus-sigmoid")},
        ),
        Variant(
            name="rela",
            formula="[x]+",
            paper=_RELA,
            use="ReLA with a plain RMSNorm; simplest, but training sometimes fails.",
            pointwise=Pointwise("relu"),
            output_norm="rms",
        ),
        Variant(
            name="rela-i",
            formula="[x]+",
            paper=_RELA,
            use="ReLA whose norm gain starts near zero: stable without extra parameters.",
            pointwise=Pointwise("relu"),
            output_norm="rms-small",
        ),
        Variant(
            name="rela-g",
            formula="[x]+",
            paper=_RELA,
            use="ReLA with a gated norm: the authors' released model and our default for translation.",
            pointwise=Pointwise("relu"),
            output_norm="gated-rms",
        ),
        Variant(
            name="reluformer",
            formula="[x]+ / (gamma sqrt(n/2))",
            paper="Shen et al. 2023 (2302.06461)",
            use="Long documents: output variance does not depend on how many keys a row sees.",
            pointwise=Pointwise("relu"),
            row_scale=activations.unit_variance,
            scale="1 / (gamma sqrt(n/2))",
            center_keys=True,
            learned_init=4.0,
            options={"gamma": Option(1.0, "temperature of the row scale", "a number above 0", "exp")},
        ),
        Variant(
            name="relu-seqlen",
            formula="[x]+ / n^a",
            paper="Wortsman et al. 2023 (2309.08586)",
            use="Vision and other fixed-length inputs, where it matches softmax with no norm.",
            pointwise=Pointwise("relu"),
            row_scale=activations.inverse_count,
            scale="n^-a",
            options={"exponent": _EXPONENT},
        ),
        Variant(
            name="relu2",
            formula="[x]+^2 / n^a",
            paper="Wortsman et al. 2023 (2309.08586); Hua et al. 2022 (2202.10447)",
            use="Sharper than ReLU: large scores count more, gradients vanish smoothly at zero.",
            pointwise=Pointwise("relu", power=2),
            row_scale=activations.inverse_count,
            scale="n^-a",
            options={"exponent": _EXPONENT},
        ),
        Variant(
            name="relu-exp",
            formula="[1 + x/p]+^p / n^a",
            paper="the q-exponential of Tsallis 1988, rectified attention's way to softmax",
            use="Starts like a softmax, with all keys open; trained with a falling power, from near softmax to relu2.",
            pointwise=Pointwise("relu", power="power", shift=RowShift("1", lambda options: -float(options["power"]))),
            row_scale=activations.inverse_count_opened,
            scale="n^-a",
            center_keys=True,
            options={"power": _POWER, "exponent": _EXPONENT},
            anneals="power",
        ),
        Variant(
            name="threshold",
            formula="[x - beta sqrt(2 log n)]+^p, x of cosines",
            paper="Threshold Rectified Attention 2026 (2601.12145)",
            use="Sparse rows at any length: scores are cosines, and what chance makes of n keys stays below.",
            pointwise=Pointwise(
                "relu", power="power", shift=RowShift("sqrt(2 log n)", lambda options: options["beta"])
            ),
            score=cosine_scores,
            scale="-beta sqrt(2 log n) inside",
            output_norm="rms",
            options=_THRESHOLD,
        ),
        Variant(
            name="threshold-diff",
            formula="w(q1, k1) - lam w(q2, k2), w of threshold",
            paper="Threshold Differential Attention 2026 (2601.12145)",
            use="Threshold whose heads have two views, so that noise which both find cancels; weights may be negative.",
            difference_of="threshold",
            score=cosine_scores,
            scale="-beta sqrt(2 log n) inside",
            output_norm="rms",
            options=_THRESHOLD | {"lam": Option(0.5, "share that is subtracted", "a number from 0 to 1", "sigmoid")},
        ),
        Variant(
            name="sigmoid",
            formula="1 / (1 + exp(-(x - log n)))",
            paper="Ramapuram et al. 2024 (2409.04431)",
            use="A smooth elementwise rival without exact zeros.",
            pointwise=Pointwise("sigmoid", shift=RowShift("log n")),
            scale="-log n inside",
        ),
        Variant(
            name="softmax1",
            formula="exp(x) / (1 + sum exp(x))",
            paper="Miller 2023, softmax off by one",
            use="Softmax that may attend to almost nothing; weights stay positive.",
            weigh=activations.softmax_off_by_one,
            rowwise="softmax1",
        ),
        Variant(
            name="self-adjust",
            formula="x softmax(x)",
            paper="Zheng et al. 2025 (2502.18277)",
            use="Softmax with gradients that do not vanish for confident rows; weights may be negative.",
            weigh=lambda x, rows: x * softmax_weights(x, rows),
            rowwise="self-adjust",
        ),
        Variant(
            name="self-adjust-norm",
            formula="(x - min(x,0)) / (max(x,0) - min(x,0)) softmax(x)",
            paper="Zheng et al. 2025 (2502.18277)",
            use="The normalized form of self-adjust: the factor stays between 0 and 1.",
            weigh=activations.self_adjust_normalized,
        ),
        Variant(
            name="softpick",
            formula="[e^x - 1]+ / sum |e^x - 1|",
            paper="Zuhri et al. 2025 (2504.20966)",
            use="A normalized row with exact zeros that may attend to nothing: no key is needed as a sink.",
            weigh=activations.softpick,
            rowwise="softpick",
        ),
        Variant(
            name="cog",
            formula="sign(x) softmax(|x|)",
            paper="Lv et al. 2024 (2411.07176)",
            use="Signed weights: a head may subtract as well as add.",
            weigh=lambda x, rows: x.sign() * softmax_weights(x.abs(), rows),
        ),
        Variant(
            name="polynomial",
            formula="x^p / sqrt(n)",
            paper="Saratchandran et al. 2024 (2410.18613)",
            use="An activation without exp or max, for studies of what softmax is needed for.",
            pointwise=Pointwise("identity", power="degree"),
            row_scale=activations.inverse_root,
            scale="1 / sqrt(n)",
            options={"degree": Option(3, "the power p", "a whole number above 0")},
        ),
        Variant(
            name="inhibitor",
            formula="sum_j [v_j - [scale |q - k_j|_1 - b]+]+",
            paper="Brannvall 2023 (2310.02041)",
            use="Attention by subtraction, for arithmetic without products; has no weights, slow here.",
            weigh=lambda x, rows: torch.relu(-x),
            score=activations.negative_distance,
            mix=activations.inhibited_sum,
            hidden=torch.inf,
        ),
        Variant(
            name="topk",
            formula="softmax over the k largest x",
            paper="Zhao et al. 2019 (1912.11637)",
            use="A fixed number of keys for each query, whatever the scores say.",
            weigh=activations.top_softmax,
            options={"keep": Option(8, "how many keys keep a weight; ties are all kept", "a whole number above 0")},
        ),
        Variant(
            name="identity",
            formula="x",
            paper="Zhang et al. 2021, ablation",
            use="Linear attention with ReLA's norm and gate: what is left without the ReLU.",
            pointwise=Pointwise("identity"),
            output_norm="gated-rms",
        ),
        Variant(
            name="gelu",
            formula="gelu(x)",
            paper="Zhang et al. 2021, ablation",
            use="A smooth ReLU in ReLA-g, for studies; small negative weights, no exact zeros.",
            pointwise=Pointwise("gelu"),
            output_norm="gated-rms",
        ),
        Variant(
            name="leaky-relu",
            formula="x where x > 0, else x / 100",
            paper="Zhang et al. 2021, ablation",
            use="A ReLU that never closes in ReLA-g, for studies: no exact zeros, no dead heads.",
            pointwise=Pointwise("leaky-relu"),
            output_norm="gated-rms",
        ),
    ]
}
