"""The page of claims, at most 25: what the paper has, what we have, the verdict, one sentence why, the command."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rectiformer.studies.corpora import THREE
from rectiformer.studies.memories import DIAGNOSES, over_layers
from rectiformer.studies.recipes import CHOICES, choice_of
from rectiformer.studies.results import Claim, Results, Table, difference, estimate, signed, verdict
from rectiformer.studies.translation_quality import PANELS, chosen

TEXTS = {"europarl": "on Europarl", "multi30k": "on Multi30k"}
BySeed = dict[int, float]
Sides = tuple[BySeed, BySeed]
"""The values of both sides of a claim, by seed."""


@dataclass(frozen=True, kw_only=True)
class PageClaim:
    """One row of the page."""

    says: str
    """The claim as a sentence about `sides`."""
    paper: str
    """What the paper has, and how we know it."""
    study: str
    only: str
    """The part of `--only` that trains what it needs."""
    sides: tuple[str, str]
    """What is compared with what, in words."""
    values: Callable[[Results], Sides]
    expected: Literal["above", "below", "equal", "no worse"]
    margin: float = 0.5
    unit: str = "BLEU"
    digits: int = 2
    needs: tuple[tuple[str, str, str], ...] = ()
    """The learning rates it waits for, keys of `CHOICES`."""
    note: str = ""
    """What a reader should know besides, one sentence."""
    seeds: int = len(THREE)


def rows(first: str, second: str, measure: str, view: Callable[[Results], Results] = lambda found: found) -> Any:
    """A measure of two rows of a study."""

    def values(results: Results) -> Sides:
        found = view(results)
        return found.by_seed(first, measure), found.by_seed(second, measure)

    return values


def translated(
    column: str, about: str, first: str = "rela-g", paper: str = "-0.3 to +0.7 on four WMT tasks [S]", **more: Any
) -> PageClaim:
    """A variant vs. softmax in a column of `translation-quality`."""
    text, norm = column.split("-")[0], column.rpartition("-")[2]
    choice: dict[str, Any] = {
        "expected": "no worse",
        "margin": 0.3,
        "says": f"{first} is at most 0.3 below softmax: {about}",
    }
    return PageClaim(
        **{
            **choice,
            "paper": paper,
            "study": "translation-quality",
            "only": column,
            "sides": (first, "softmax"),
            "values": rows(f"{column}-{first}", f"{column}-softmax", "bleu", chosen),
            "needs": ((text, norm, first), (text, norm, "softmax")),
            **more,
        }
    )


def aligned(gold: str, column: str, paper: str, **more: Any) -> PageClaim:
    """rela-g's lowest alignment error vs. softmax's on a gold set."""
    return translated(
        column,
        "",
        paper=paper,
        says=f"rela-g aligns better than softmax, best head: {gold}",
        expected="below",
        unit="AER, %",
        digits=1,
        values=rows(f"{column}-rela-g", f"{column}-softmax", f"aer_{gold}", chosen),
        **more,
    )


def in_panels(
    measure: Callable[[Mapping[str, Sequence[float]]], float], gold: str, name: str, results: Results
) -> BySeed:
    """A measure of the four panels of a row, by seed."""
    return {entry.seed: measure(entry.measures[f"alignment_{gold}"]["panels"]) for entry in chosen(results).of(name)}


def averaged(panels: Mapping[str, Sequence[float]]) -> float:
    """The lowest error of heads averaged."""
    return min(min(panels[panel]) for panel in PANELS if panel.endswith("average"))


def best_layer(panel: str, panels: Mapping[str, Sequence[float]]) -> float:
    """The layer, from 1, with the lowest error in a panel."""
    return 1 + min(range(len(panels[panel])), key=lambda layer: panels[panel][layer])


WORDS = "europarl-en-de-words-post"
OURS, BASE = f"{WORDS}-rela-g", f"{WORDS}-softmax"
OF_RELA = (("europarl", "post", "rela-g"),)
of_words = partial(
    PageClaim, study="translation-quality", only=WORDS, needs=(*OF_RELA, ("europarl", "post", "softmax"))
)


def rise(results: Results) -> Sides:
    """Null rates of rela-g's cross-attention, with the sources of other pairs and with its own."""
    entries = [entry for entry in chosen(results).of(OURS) if "null_rise" in entry.measures]
    mean = {entry.seed: sum(entry.measures["null_gold"]) / len(entry.measures["null_gold"]) for entry in entries}
    return {entry.seed: mean[entry.seed] + entry.measures["null_rise"] for entry in entries}, mean


def speeds(results: Results) -> Sides:
    """How fast rela-g trains relative to softmax, each with its kernels."""
    speed = {entry.seed: entry.measures["speed"] for entry in results.finished}
    ours = {seed: each["softmax fused"]["update"] / each["rela-g fused"]["update"] for seed, each in speed.items()}
    return ours, dict.fromkeys(ours, 1.0)


def diagnosed(name: str, paper: str, expected: Literal["above", "below"], says: str) -> PageClaim:
    """A diagnosis of memories with softmax vs. ReLU."""

    def values(results: Results) -> Sides:
        softmax, relu = (over_layers(results, memory, DIAGNOSES[name]) for memory in ("softmax", "relu"))
        return softmax, relu

    return PageClaim(
        says=says,
        paper=paper,
        study="memory-diagnostics",
        only="softmax,relu",
        sides=("softmax", "ReLU"),
        unit="ratio",
        values=values,
        expected=expected,
        digits=3,
    )


memory = partial(PageClaim, study="memory-swap")
GROUPS: dict[str, tuple[PageClaim, ...]] = {
    "ReLA: translation": (
        translated(
            WORDS,
            "Europarl en-de in words, post-norm",
            note="Without clipping, at 8e-4, one of three seeds of softmax trained (27.14 BLEU) "
            "and all of rela-g (26.96).",
        ),
        translated("europarl-en-de-words-pre", "the same text, pre-norm", paper="pre-norm is not in the paper"),
        translated("europarl-en-de-post", "Europarl en-de as it is written, post-norm"),
        translated("europarl-en-fr-words-post", "Europarl en-fr in words, post-norm"),
        translated("multi30k-de-en-post", "Multi30k de-en, post-norm"),
        translated("multi30k-en-fr-post", "Multi30k en-fr, post-norm"),
        translated(
            WORDS,
            "",
            "sparsemax",
            "-1.9 to +0.8 on four WMT tasks [S]",
            expected="equal",
            margin=0.5,
            says="sparsemax is within 0.5 of softmax: Europarl en-de in words, post-norm",
        ),
        translated(
            WORDS,
            "",
            "entmax15",
            "-0.3 to +0.7 on four WMT tasks [S]",
            expected="equal",
            margin=0.5,
            says="1.5-entmax is within 0.5 of softmax: Europarl en-de in words, post-norm",
        ),
    ),
    "ReLA: word alignment": (
        aligned("deen-bicici", WORDS, "-1.3 on RWTH's set [S, read off]"),
        aligned("silver-ende", WORDS, "-1.3 on RWTH's set [S, read off]"),
        aligned("enfr-hansards", "europarl-en-fr-words-post", "-1.3 on RWTH's set, en-de [S, read off]"),
        of_words(
            says="Averaging all heads ruins softmax's alignment, not rela-g's: silver-ende, best layer",
            paper="-9.9: 37.0 vs. 46.9 [S, read off]",
            sides=("rela-g", "softmax"),
            values=lambda results: (
                in_panels(averaged, "silver-ende", OURS, results),
                in_panels(averaged, "silver-ende", BASE, results),
            ),
            expected="below",
            unit="AER, %",
            digits=1,
        ),
        of_words(
            says="rela-g's layer of least error is higher with normal than with shifted attention: silver-ende",
            paper="+3: layer 5 vs. layer 2 [S, read off]",
            sides=("normal", "shifted"),
            values=lambda results: (
                in_panels(partial(best_layer, PANELS[0]), "silver-ende", OURS, results),
                in_panels(partial(best_layer, PANELS[1]), "silver-ende", OURS, results),
            ),
            expected="above",
            unit="layers",
            digits=1,
            needs=OF_RELA,
        ),
    ),
    "ReLA: sparsity and heads": (
        of_words(
            says="rela-g's cross-attention has more zeros than 1.5-entmax's",
            paper="more [R]",
            sides=("rela-g", "1.5-entmax"),
            values=rows(OURS, f"{WORDS}-entmax15", "cross_zeros", chosen),
            expected="above",
            unit="share of zeros",
            digits=3,
        ),
        of_words(
            says="Heads attend to nothing more often where source and target do not belong together",
            paper="more often [R-]",
            sides=("shuffled", "gold"),
            values=rise,
            expected="above",
            unit="share of null rows",
            digits=3,
            needs=OF_RELA,
        ),
        of_words(
            says="rela-g's heads differ more from each other than softmax's",
            paper="the most diverse of all [S]",
            sides=("rela-g", "softmax"),
            values=rows(OURS, BASE, "cross_js", chosen),
            expected="above",
            unit="JS divergence (nats)",
            digits=3,
        ),
        PageClaim(
            says="Without its norm rela-g does not train: Multi30k de-en, narrow model",
            paper="diverges [R]",
            study="ablations",
            only="no-norm,rela-g-seed",
            sides=("no norm", "rela-g"),
            values=rows("no-norm", "rela-g", "bleu"),
            expected="below",
        ),
    ),
    "ReLA: speed": (
        PageClaim(
            says="ReLA trains nearly as fast as softmax, with the kernels each has",
            paper="0.93x [S]",
            study="efficiency",
            only="alone",
            sides=("rela-g", "softmax"),
            values=speeds,
            expected="no worse",
            margin=0.1,
            unit="speed relative to softmax",
            seeds=2,
            note="Measured once; another run had 1.03x, so ratios are known to 7 %.",
        ),
    ),
    "ReLUFormer: attention": (
        translated(
            "multi30k-de-en-post",
            "",
            "reluformer",
            "+0.34 on IWSLT14 [T]",
            expected="above",
            says="ReLUFormer translates better than softmax: Multi30k de-en, post-norm",
        ),
        PageClaim(
            says="ReLUFormer gains on softmax where a model reads 1,024 subwords at once",
            paper="+1.15 on Europarl7 [T]",
            study="document-length",
            only="1024",
            sides=("reluformer", "softmax"),
            values=rows("reluformer-1024", "softmax-1024", "d_bleu"),
            expected="above",
            unit="d-BLEU",
            needs=(("europarl", "post", "reluformer"), ("europarl", "post", "softmax")),
        ),
    ),
    "ReLUFormer: feed-forward layers as memories": (
        memory(
            says="A memory with ReLU is better than one with softmax",
            paper="+1.14 on IWSLT14 [T]",
            only="relu-seed,softmax-seed",
            sides=("ReLU", "softmax"),
            values=rows("relu", "softmax", "bleu"),
            expected="above",
        ),
        memory(
            says="A LayerNorm makes softmax as good as ReLU",
            paper="-0.01 on IWSLT14 [T]",
            only="relu-seed,softmax-ln-seed",
            sides=("softmax with LayerNorm", "ReLU"),
            values=rows("softmax-ln", "relu", "bleu"),
            expected="equal",
        ),
        PageClaim(
            says="With 4,096 slots ReLU is ahead of softmax with LayerNorm",
            paper="above [T]",
            study="slot-sweep",
            only="4096",
            sides=("ReLU", "softmax with LayerNorm"),
            values=rows("relu-4096", "softmax-ln-4096", "bleu"),
            expected="above",
        ),
        diagnosed("variance ratio", "far below [T]", "below", "Softmax's output is small next to the residual stream"),
        diagnosed(
            "top 0.2% of slots hold",
            "above 85 % vs. clearly less [T]",
            "above",
            "Softmax's scores sit in few slots",
        ),
    ),
}
"""What the page shows at `small`."""


@dataclass(frozen=True)
class Judged:
    """A claim with what we have."""

    ours: str
    verdict: str
    why: str
    waits: bool = False
    """Whether seeds are missing."""


def judge(claim: PageClaim, results: Results) -> Judged:
    """The verdict by the interval over seeds, once all seeds are there; why, in one sentence."""
    first, second = claim.values(results)
    found = difference(first, second)
    if both := first.keys() & second.keys():  # so that the difference shown is that of the means shown
        first, second = ({seed: values[seed] for seed in sorted(both)} for values in (first, second))
    known = dict(zip(claim.sides, (first, second), strict=True))
    sides = " vs. ".join(f"{side} {describe_side(values, claim.digits)}" for side, values in known.items() if values)
    ours = ": ".join(filter(None, (signed(found, claim.digits), f"{sides} ({claim.unit})" if sides else "")))
    shared = len(both)
    if shared < claim.seeds:
        return Judged(ours, "open", reason(claim, first, second), waits=True)
    says = verdict(found, Claim(*claim.sides, claim.expected, claim.paper, claim.margin))
    assert found is not None
    assert found.half is not None
    low, high = (f"{found.mean + side * found.half:+.{claim.digits}f}" for side in (-1, 1))
    return Judged(ours, says, f"Over {shared} seeds the interval is {low} to {high}; {wanted(claim)}.")


def reason(claim: PageClaim, first: BySeed, second: BySeed) -> str:
    """Why a claim is still open."""
    waiting = [key for key in claim.needs if choice_of(*key).chosen is None]
    if waiting:
        text, norm, _ = waiting[0]
        like = next(name for name in ("softmax", "rela-g") if CHOICES[text, norm, name] is choice_of(*waiting[0]))
        return f"Not trained yet: the learning rate of {like} {TEXTS[text]} in {norm}-norm is still being chosen."
    if not first and not second:
        return "Not trained yet."
    missing = [side for side, values in zip(claim.sides, (first, second), strict=True) if not values]
    if missing:
        return f"{missing[0]} is not trained yet."
    shared = len(first.keys() & second.keys())
    return f"{shared} of {claim.seeds} {'runs' if claim.study == 'efficiency' else 'seeds'} so far."


def wanted(claim: PageClaim) -> str:
    """Where the interval of a claim that holds lies."""
    if claim.expected == "equal":
        return f"the claim asks for -{claim.margin:g} to +{claim.margin:g}"
    least = -claim.margin if claim.expected == "no worse" else 0
    return f"the claim asks for {'less' if claim.expected == 'below' else 'more'} than {least:g}"


def describe_side(values: BySeed, digits: int) -> str:
    """`27.01 [2]`: the mean, and the number of seeds."""
    found = estimate(list(values.values()))
    assert found is not None
    return f"{found.mean:.{digits}f} [{len(values)}]"


def render_claims(found: Mapping[str, Results]) -> str:
    """The page's summary, and for each group a table of what is measured and a list of what is not."""
    judged = {group: [(each, judge(each, found[each.study])) for each in claims] for group, claims in GROUPS.items()}
    every = [pair for pairs in judged.values() for pair in pairs]
    lines = [INTRODUCTION, summarize(every)]
    for group, pairs in judged.items():
        table = [
            (
                claim.says,
                claim.paper,
                outcome.ours,
                f"**{outcome.verdict}**",
                " ".join(filter(None, (outcome.why, claim.note))),
                find_command(claim),
            )
            for claim, outcome in pairs
            if outcome.ours
        ]
        columns = ("claim", "paper", "ours", "verdict", "why", "command")
        lines += [f"## {group}", Table("", columns, table).to_markdown().partition("\n\n")[2] if table else ""]
        waiting = [
            f"- {claim.says}. Paper: {claim.paper}. {find_command(claim)}"
            for claim, outcome in pairs
            if not outcome.ours
        ]
        lines += ["Not trained yet:", "\n".join(waiting)] if waiting else []
    return "\n\n".join(line.strip("\n") for line in lines if line)


def find_command(claim: PageClaim) -> str:
    """What trains the models of a claim, as the page shows it."""
    return f"[{claim.study}](studies/{claim.study}.md) `--only {claim.only}`"


def summarize(every: Sequence[tuple[PageClaim, Judged]]) -> str:
    """What holds, what does not, and what is not known yet: the claims by verdict."""
    parts = []
    for word, title in VERDICTS.items():
        named = [f"- {claim.says}." for claim, outcome in every if outcome.verdict == word]
        if word == "open":
            reasons = Counter(found.why if found.waits else UNDECIDED for _, found in every if found.verdict == word)
            named = [
                f"- {count} claim{'s' * (count > 1)}: {why[0].lower()}{why[1:]}" for why, count in reasons.most_common()
            ]
        count = sum(outcome.verdict == word for _, outcome in every)
        parts.append(f"**{title}: {count} of {len(every)}**" + (":\n\n" + "\n".join(named) if named else "."))
    return "\n\n".join(parts)


VERDICTS = {"agree": "Holds here", "disagree": "Does not hold here", "open": "Not known yet"}
UNDECIDED = "All seeds are there, and their interval leaves it open."
INTRODUCTION = """Every model below is trained to the end: its learning rate falls to 0 at the last update. Rates are
[chosen on validation data](studies.md#what-small-trains). A claim is judged once all seeds are there; until then it is
open, and says why. Half-trained models show how fast a variant learns, which is
[a study of its own](studies/learning-speed.md), and judge nothing here."""
