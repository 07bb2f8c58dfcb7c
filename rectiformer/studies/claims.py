"""The page of claims, at most 25: what the paper has, what we have, the verdict and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

from rectiformer.studies.corpora import BICICI, HANSARDS, SILVER, THREE, Gold, find_corpus
from rectiformer.studies.memories import DIAGNOSES, over_layers
from rectiformer.studies.recipes import CHOICES, choice_of
from rectiformer.studies.results import Claim, Results, Table, difference, signed, verdict
from rectiformer.studies.translation_quality import PANELS, column_of

TEXTS = {"europarl": "Europarl", "multi30k": "Multi30k"}
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
    """The part of `--only` that trains what it needs; empty for the whole study."""
    part: str = ""
    """What that part is, in words; the claim itself unless given."""
    page: str = ""
    """The study whose page shows it, if that is not the one that trains it."""
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


def rows(first: str, second: str, measure: str, column: str = "") -> Any:
    """A measure of two rows of a study, or of two variants in a column of `translation-quality`."""

    def values(results: Results) -> Sides:
        found = column_of(results, column) if column else results
        return found.by_seed(first, measure), found.by_seed(second, measure)

    return values


def name_column(column: str) -> str:
    """The text and norm placement of a column of `translation-quality`, in words."""
    corpus, _, norm = column.rpartition("-")
    return find_corpus("small", corpus).title_in(norm)


def translated(
    column: str,
    first: str = "rela-g",
    says: str = "rela-g is at most 0.3 below softmax",
    paper: str = "-0.3 to +0.7 on four WMT tasks [S]",
    **more: Any,
) -> PageClaim:
    """A variant vs. softmax in a column of `translation-quality`."""
    text, norm = column.split("-")[0], column.rpartition("-")[2]
    choice: dict[str, Any] = {"expected": "no worse", "margin": 0.3, "says": f"{says}: {name_column(column)}"}
    return PageClaim(
        **{
            **choice,
            "paper": paper,
            "study": "translation-quality",
            "only": column,
            "part": name_column(column),
            "sides": (first, "softmax"),
            "values": rows(first, "softmax", "bleu", column),
            "needs": ((text, norm, first), (text, norm, "softmax")),
            **more,
        }
    )


def aligned(gold: Gold, column: str, paper: str = "-1.3 on RWTH's set, en-de [S, read off]") -> PageClaim:
    """rela-g's lowest alignment error vs. softmax's on a gold set."""
    return replace(
        translated(column),
        says=f"rela-g's best head aligns better than softmax's: {gold.title}",
        paper=paper,
        page="alignment",
        expected="below",
        unit="% AER",
        digits=1,
        values=rows("rela-g", "softmax", f"aer_{gold.name}", column),
    )


def in_panels(measure: Callable[[Mapping[str, Sequence[float]]], float], variant: str, results: Results) -> BySeed:
    """A measure of the four panels of a variant on the silver links, by seed."""
    entries = column_of(results, WORDS).of(variant)
    return {entry.seed: measure(entry.measures[f"alignment_{SILVER.name}"]["panels"]) for entry in entries}


def averaged(panels: Mapping[str, Sequence[float]]) -> float:
    """The lowest error of heads averaged."""
    return min(min(panels[panel]) for panel in PANELS if panel.endswith("average"))


def best_layer(panel: str, panels: Mapping[str, Sequence[float]]) -> float:
    """The layer, from 1, with the lowest error in a panel."""
    return 1 + min(range(len(panels[panel])), key=lambda layer: panels[panel][layer])


WORDS = "europarl-en-de-words-post"
OF_RELA = (("europarl", "post", "rela-g"),)
of_words = partial(
    PageClaim,
    study="translation-quality",
    only=WORDS,
    part=name_column(WORDS),
    needs=(*OF_RELA, ("europarl", "post", "softmax")),
)


def rise(results: Results) -> Sides:
    """Null rates of rela-g's cross-attention, with the sources of other pairs and with its own."""
    entries = [entry for entry in column_of(results, WORDS).of("rela-g") if "null_rise" in entry.measures]
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
        unit="",
        values=values,
        expected=expected,
        digits=3,
    )


memory = partial(PageClaim, study="memory-swap")
GROUPS: dict[str, tuple[PageClaim, ...]] = {
    "ReLA: translation": (
        translated(
            WORDS,
            note="Without clipping, at a rate of 8e-4, only one of three seeds of softmax learned to translate (27.14 "
            "BLEU), but all three of rela-g did (26.96).",
        ),
        translated("europarl-en-de-words-pre", paper="only post-norm"),
        translated("europarl-en-de-post"),
        translated("europarl-en-fr-words-post"),
        translated("multi30k-de-en-post"),
        translated("multi30k-en-fr-post"),
        translated(
            WORDS,
            "sparsemax",
            "sparsemax is within 0.5 of softmax",
            "-1.9 to +0.8 on four WMT tasks [S]",
            expected="equal",
            margin=0.5,
        ),
        translated(
            WORDS,
            "entmax15",
            "1.5-entmax is within 0.5 of softmax",
            sides=("1.5-entmax", "softmax"),
            expected="equal",
            margin=0.5,
        ),
    ),
    "ReLA: word alignment": (
        aligned(BICICI, WORDS),
        aligned(SILVER, WORDS),
        aligned(HANSARDS, "europarl-en-fr-words-post"),
        of_words(
            says=f"Averaging all heads ruins softmax's alignment, not rela-g's: {SILVER.title}, best layer",
            paper="-9.9: 37.0 vs. 46.9 [S, read off]",
            page="alignment",
            sides=("rela-g", "softmax"),
            values=lambda results: (in_panels(averaged, "rela-g", results), in_panels(averaged, "softmax", results)),
            expected="below",
            unit="% AER",
            digits=1,
        ),
        of_words(
            says="rela-g's layer of least error is higher where a word is predicted (normal) than where it is read "
            f"(shifted): {SILVER.title}",
            paper="+3: layer 5 vs. layer 2 [S, read off]",
            page="alignment",
            sides=("normal", "shifted"),
            values=lambda results: (
                in_panels(partial(best_layer, PANELS[0]), "rela-g", results),
                in_panels(partial(best_layer, PANELS[1]), "rela-g", results),
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
            page="sparsity",
            sides=("rela-g", "1.5-entmax"),
            values=rows("rela-g", "entmax15", "cross_zeros", WORDS),
            expected="above",
            unit="of all weights",
            digits=3,
        ),
        of_words(
            says="rela-g's cross-attention attends to nothing more often with a wrong source than with the right one",
            paper="more often [R-]",
            page="sparsity",
            sides=("wrong source", "right source"),
            values=rise,
            expected="above",
            unit="of all queries",
            digits=3,
            needs=OF_RELA,
        ),
        of_words(
            says="rela-g's heads of cross-attention differ more from each other than softmax's (JS divergence)",
            paper="the most diverse of all [S]",
            page="sparsity",
            sides=("rela-g", "softmax"),
            values=rows("rela-g", "softmax", "cross_js", WORDS),
            expected="above",
            unit="nats",
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
            only="",
            sides=("rela-g", "softmax"),
            values=speeds,
            expected="no worse",
            margin=0.1,
            unit="of softmax's speed",
            seeds=2,
            note="Speed was measured once; another run had 1.03x, so ratios are known to 7 %.",
        ),
    ),
    "ReLUFormer: attention": (
        translated(
            "multi30k-de-en-post",
            "reluformer",
            "ReLUFormer translates better than softmax",
            "+0.34 on IWSLT14 [T]",
            expected="above",
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
    known = zip(claim.sides, (first, second), strict=True)
    sides = ", ".join(f"{side} {fmean(values.values()):.{claim.digits}f}" for side, values in known if values)
    unit = f" {claim.unit}".rstrip()
    ours = f"{signed(found, claim.digits)}{unit}: {sides}" if found else f"{sides}{unit}" if sides else ""
    if len(both) < claim.seeds:
        return Judged(ours, "open", reason(claim, first, second), waits=True)
    says = verdict(found, Claim(*claim.sides, claim.expected, claim.paper, claim.margin))
    return Judged(ours, says, f"over {len(both)} seeds; the claim asks for {wanted(claim)}")


def reason(claim: PageClaim, first: BySeed, second: BySeed) -> str:
    """Why a claim is still open."""
    waiting = [key for key in claim.needs if choice_of(*key).chosen is None]
    if waiting:
        text, norm, _ = waiting[0]
        like = next(name for name in ("softmax", "rela-g") if CHOICES[text, norm, name] is choice_of(*waiting[0]))
        return f"not trained yet, as the learning rate of {like} on {TEXTS[text]} in {norm}-norm is still being chosen"
    missing = [side for side, values in zip(claim.sides, (first, second), strict=True) if not values]
    if missing:
        return "not trained yet" if len(missing) == 2 else f"{missing[0]} is not trained yet"
    shared = len(first.keys() & second.keys())
    return f"{shared} of {claim.seeds} {'runs' if claim.study == 'efficiency' else 'seeds'} so far"


def wanted(claim: PageClaim) -> str:
    """Where the interval of a claim that holds lies."""
    if claim.expected == "equal":
        return f"-{claim.margin:g} to +{claim.margin:g}"
    least = -claim.margin if claim.expected == "no worse" else 0
    return f"{'less' if claim.expected == 'below' else 'more'} than {least:g}"


def render_claims(found: Mapping[str, Results]) -> str:
    """The page: how many claims hold, how to read it, and each group of claims."""
    judged = {group: [(each, judge(each, found[each.study])) for each in claims] for group, claims in GROUPS.items()}
    every = [pair for pairs in judged.values() for pair in pairs]
    groups = [part for group, pairs in judged.items() for part in (f"## {group}", render_group(pairs))]
    return "\n\n".join([INTRODUCTION, summarize(every), READING, *groups])


def render_group(pairs: Sequence[tuple[PageClaim, Judged]]) -> str:
    """A table of the claims that have results, notes on them, and lists of the others by what they wait for."""
    measured = [(claim, outcome) for claim, outcome in pairs if outcome.ours]
    table = [
        (link(claim), claim.paper, outcome.ours, f"**{outcome.verdict}**: {outcome.why}", command(claim))
        for claim, outcome in measured
    ]
    columns = ("claim", "paper", "ours", "verdict", "command")
    parts = [Table("", columns, table).to_markdown().strip()] if table else []
    parts += [claim.note for claim, _ in measured if claim.note]
    waiting: dict[str, list[str]] = {}
    for claim, outcome in pairs:
        if not outcome.ours:
            why = f"{outcome.why[0].upper()}{outcome.why[1:]}:\n"
            waiting.setdefault(why, []).append(f"- {link(claim)}. Paper: {claim.paper}. {command(claim)}")
    return "\n\n".join([*parts, *("\n".join([why, *lines]) for why, lines in waiting.items())])


def link(claim: PageClaim) -> str:
    return f"[{claim.says}](studies/{claim.page or claim.study}.md)"


def command(claim: PageClaim) -> str:
    """What trains its models, after `rectiformer` and with the options that the page names."""
    return f"`study {claim.study}{f' --only {claim.only}' if claim.only else ''}`"


def list_parts(study: str) -> dict[str, str]:
    """What `--only` may name to train what the claims on the page of a study need, each with what it is."""
    found: dict[str, dict[str, None]] = {}
    for claim in (claim for group in GROUPS.values() for claim in group):
        if claim.only and (claim.page or claim.study) == study:
            found.setdefault(claim.only, {})[claim.part or claim.says] = None
    return {only: "; ".join(parts) for only, parts in found.items()}


def summarize(every: Sequence[tuple[PageClaim, Judged]]) -> str:
    """How many claims hold, do not, and are open; of the first two, which."""
    named = {
        word: [f"- {claim.says}." for claim, outcome in every if outcome.verdict == word]
        for word in ("agree", "disagree")
    }
    still_open = [outcome for _, outcome in every if outcome.verdict == "open"]
    untrained = sum(not outcome.ours for outcome in still_open)
    begun = sum(outcome.waits for outcome in still_open) - untrained
    reasons = {
        "have no results yet": untrained,
        "lack seeds or one of the two models": begun,
        "have all seeds, but an interval that allows both": len(still_open) - untrained - begun,
    }
    counts = (
        f"**Of {len(every)} claims, {len(named['agree'])} hold here, {len(named['disagree'])} do not, and "
        f"{len(still_open)} are open**: {', '.join(f'{count} {reason}' for reason, count in reasons.items() if count)}."
    )
    lists = [f"{title}\n\n" + "\n".join(named[word]) for word, title in VERDICTS.items() if named[word]]
    return "\n\n".join([counts, *lists])


VERDICTS = {"agree": "What holds here:", "disagree": "What does not hold here:"}
INTRODUCTION = """Which claims of ReLA (Zhang et al. 2021) and ReLUFormer (Shen et al. 2023) hold in our trainings?
rela-g is ReLA with its gated norm; [variants](variants.md) has all formulas."""
READING = """How to read the tables:

- *claim*: leads to the page that has more tables and figures.
- *ours*: the difference of the two models, paired over seeds, with its 95 % interval; then the mean of each.
- *verdict*: a claim is judged once three seeds of both models are trained to the end, at learning rates
  [chosen on validation data](studies.md#what-small-trains). We agree, if the interval lies where the claim asks for it,
  and disagree, if it lies on the other side; otherwise it is open.
- *command*: after `rectiformer`, with `--scale small --out studies`; it trains what the claim needs.
- *paper*: after the number, where it is from: [S] the authors' paper, figures or code, [T] another text about them,
  [R] recalled from memory, not checked ([R+] with high, [R-] with low confidence).
- *in words*: lowercase words, split as in the linked sentences that measure alignment. BLEU is not comparable with that
  of other text.

`rectiformer study report docs` makes this page and those of the studies from docs/results."""
