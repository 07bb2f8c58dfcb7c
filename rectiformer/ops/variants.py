"""THE table of attention variants. A variant is one row here; everything else that lists variants reads this table.

What a row says is in `variant.py`.
"""

from __future__ import annotations

import torch

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.ops.activations import (
    cog,
    entmax15_weights,
    entmax_weights,
    gelu_weights,
    identity,
    inhibited_sum,
    inhibition,
    inverse_count,
    leaky_weights,
    negative_distance,
    polynomial,
    self_adjust,
    self_adjust_normalized,
    sigmoid_weights,
    softmax_off_by_one,
    softmax_weights,
    sparsemax_weights,
    top_softmax,
    unit_variance,
)
from rectiformer.ops.variant import Option, Variant


def find_variant(name: str) -> Variant:
    """The row called `name`; an unknown name is refused with the nearest known ones."""
    if name not in VARIANTS:
        raise ArgumentError(unknown_name("variant", name, VARIANTS))
    return VARIANTS[name]


_EXPONENT = Option(1.0, "a in the row scale n^-a", "a number of at least 0")
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
            weigh=sparsemax_weights,
        ),
        Variant(
            name="entmax15",
            formula="[x/2 - tau]+^2, sum 1",
            paper="Peters et al. 2019 (1905.05702)",
            use="A milder sparse baseline on the simplex, often the best of its family.",
            weigh=entmax15_weights,
        ),
        Variant(
            name="entmax",
            formula="[(alpha-1) x - tau]+^(1/(alpha-1)), sum 1",
            paper="Correia et al. 2019 (1909.00015)",
            use="When each head should learn how sparse to be between softmax and sparsemax.",
            weigh=entmax_weights,
            options={"alpha": Option(1.5, "1 is softmax, 2 is sparsemax", "a number above 1", "one-plus-sigmoid")},
        ),
        Variant(
            name="rela",
            formula="[x]+",
            paper=_RELA,
            use="ReLA with a plain RMSNorm; simplest, but training sometimes fails.",
            power=1,
            output_norm="rms",
        ),
        Variant(
            name="rela-i",
            formula="[x]+",
            paper=_RELA,
            use="ReLA whose norm gain starts near zero: stable without extra parameters.",
            power=1,
            output_norm="rms-small",
        ),
        Variant(
            name="rela-g",
            formula="[x]+",
            paper=_RELA,
            use="ReLA with a gated norm: the authors' released model and our default for translation.",
            power=1,
            output_norm="gated-rms",
        ),
        Variant(
            name="reluformer",
            formula="[x]+ / (gamma sqrt(n/2))",
            paper="Shen et al. 2023 (2302.06461)",
            use="Long documents: output variance does not depend on how many keys a row sees.",
            power=1,
            row_scale=unit_variance,
            scale="1 / (gamma sqrt(n/2))",
            centered=True,
            learned_start=4.0,
            options={"gamma": Option(1.0, "temperature of the row scale", "a number above 0", "exp")},
        ),
        Variant(
            name="relu-seqlen",
            formula="[x]+ / n^a",
            paper="Wortsman et al. 2023 (2309.08586)",
            use="Vision and other fixed-length inputs, where it matches softmax with no norm.",
            power=1,
            row_scale=inverse_count,
            scale="n^-a",
            options={"exponent": _EXPONENT},
        ),
        Variant(
            name="relu2",
            formula="[x]+^2 / n^a",
            paper="Wortsman et al. 2023 (2309.08586); Hua et al. 2022 (2202.10447)",
            use="Sharper than ReLU: large scores count more, gradients vanish smoothly at zero.",
            power=2,
            row_scale=inverse_count,
            scale="n^-a",
            options={"exponent": _EXPONENT},
        ),
        Variant(
            name="sigmoid",
            formula="1 / (1 + exp(-(x - log n)))",
            paper="Ramapuram et al. 2024 (2409.04431)",
            use="A smooth elementwise rival without exact zeros.",
            weigh=sigmoid_weights,
            scale="-log n inside",
        ),
        Variant(
            name="softmax1",
            formula="exp(x) / (1 + sum exp(x))",
            paper="Miller 2023, softmax off by one",
            use="Softmax that may attend to almost nothing; weights stay positive.",
            weigh=softmax_off_by_one,
        ),
        Variant(
            name="self-adjust",
            formula="x softmax(x)",
            paper="Zheng et al. 2025 (2502.18277)",
            use="Softmax with gradients that do not vanish for confident rows; weights may be negative.",
            weigh=self_adjust,
        ),
        Variant(
            name="self-adjust-norm",
            formula="(x - min(x,0)) / (max(x,0) - min(x,0)) softmax(x)",
            paper="Zheng et al. 2025 (2502.18277)",
            use="The normalized form of self-adjust: the factor stays between 0 and 1.",
            weigh=self_adjust_normalized,
        ),
        Variant(
            name="cog",
            formula="sign(x) softmax(|x|)",
            paper="Lv et al. 2024 (2411.07176)",
            use="Signed weights: a head may subtract as well as add.",
            weigh=cog,
        ),
        Variant(
            name="polynomial",
            formula="x^p / sqrt(n)",
            paper="Saratchandran et al. 2024 (2410.18613)",
            use="An activation without exp or max, for studies of what softmax is needed for.",
            weigh=polynomial,
            scale="1 / sqrt(n)",
            options={"degree": Option(3, "the power p", "a whole number above 0")},
        ),
        Variant(
            name="inhibitor",
            formula="sum_j [v_j - [scale |q - k_j|_1 - b]+]+",
            paper="Brannvall 2023 (2310.02041)",
            use="Attention by subtraction, for arithmetic without products; has no weights, slow here.",
            weigh=inhibition,
            score=negative_distance,
            mix=inhibited_sum,
            hidden=torch.inf,
        ),
        Variant(
            name="topk",
            formula="softmax over the k largest x",
            paper="Zhao et al. 2019 (1912.11637)",
            use="A fixed number of keys for each query, whatever the scores say.",
            weigh=top_softmax,
            options={"keep": Option(8, "how many keys keep a weight; ties are all kept", "a whole number above 0")},
        ),
        Variant(
            name="identity",
            formula="x",
            paper="Zhang et al. 2021, ablation",
            use="Linear attention with ReLA's norm and gate: what is left without the ReLU.",
            weigh=identity,
            output_norm="gated-rms",
        ),
        Variant(
            name="gelu",
            formula="gelu(x)",
            paper="Zhang et al. 2021, ablation",
            use="A smooth ReLU in ReLA-g, for studies; small negative weights, no exact zeros.",
            weigh=gelu_weights,
            output_norm="gated-rms",
        ),
        Variant(
            name="leaky-relu",
            formula="x where x > 0, else x / 100",
            paper="Zhang et al. 2021, ablation",
            use="A ReLU that never closes in ReLA-g, for studies: no exact zeros, no dead heads.",
            weigh=leaky_weights,
            output_norm="gated-rms",
        ),
    ]
}
