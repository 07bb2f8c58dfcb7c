"""The texts of the studies: corpora and their recipes, test sets, gold alignments, and the form these are in."""

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rectiformer.config import Config, DataConfig
from rectiformer.measure.alignment import Links, flip, read_gold
from rectiformer.studies import recipes
from rectiformer.studies.plan import Scale, rename_files
from rectiformer.studies.recipes import Peak, choice_of
from rectiformer.text.corpus import Counts, read_pairs, read_two_files
from rectiformer.text.grammar import draw_documents, draw_sentences
from rectiformer.text.lines import read_lines

Pair = tuple[str, str]
SENTENCE_TESTS = {"small": ("test_2016_flickr.de", "test_2016_flickr.en"), "paper": ("test.de", "test.en")}
DOCUMENT_TESTS = {"small": ("test.en.xz", "test.de.xz"), "paper": ("test.en", "test.de")}
SMOKE_TESTS, SMOKE_CORPUS_TESTS, SMOKE_DOCUMENTS, TEST_SEED = 100, 60, 6, 7
ONE, THREE = (1,), (1, 2, 3)
EVERY = ("softmax", "rela-g", "reluformer", "sparsemax", "entmax15", "rela-i", "relu-seqlen")
"""The variants that are compared."""
HEADLINE = (*EVERY[:3], recipes.THRESHOLD, recipes.OPEN)
"""The rows that are trained first at `paper`, our own among them."""
OTHERS = (*EVERY[2:6], recipes.OPEN)
CLAIMED = ("sparsemax", "entmax15", "rela-i")
"""Of `OTHERS` those of which ReLA's paper says how they compare with softmax."""
MARKER = "<d>"
NUMBER, TITLE = r"\d+(?:[.,]\d+)+", r"\b(?:mr|mrs|dr|st|hon|m)\."
JOINED = re.compile(rf"{NUMBER}|'s\b|\w+(?:-\w+)*|[^\w\s]")
APART = re.compile(rf"{NUMBER}|{TITLE}|'s\b|\w+|[^\w\s]")
FRENCH = re.compile(rf"{NUMBER}|{TITLE}|\w+'|\w+|[^\w\s]")
FORMS: Mapping[str, Mapping[str, re.Pattern[str]]] = {
    "words": {"en": JOINED, "de": JOINED},
    "words-apart": {"en": APART, "fr": FRENCH},
}
"""What a word is in each form and language: "words" as in deen-bicici, "words-apart" as in enfr-hansards, which splits
at hyphens too and expands French elisions and contractions."""

CONTRACTED = {"au": "à le", "aux": "à les", "du": "de le", "des": "de les"}
EXPANDED = {
    **CONTRACTED,
    **{f"{first}'": f"{first}e" for first in "cdjlmnst"},
    **{f"{first}qu'": f"{first}que" for first in ("", "jus", "lors", "puis", "quoi", "quel")},
}


@dataclass(frozen=True, kw_only=True)
class Gold:
    """Links between words of tokenized sentences, found by people or by a statistical aligner."""

    name: str
    title: str
    """What a reader is told that it is."""
    files: tuple[str, str, str] = ("", "", "")
    """Source, target and links, under the folder of the data; none for the built-in grammar."""
    flipped: bool = False
    """Whether the links are (target, source)."""
    lines: int | None = None
    """How many lines to take; all unless given."""
    aligner: str = ""
    """What eflomal reaches on it, a sentence for the tables."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model to train on a corpus, once per seed."""

    variant: str
    seeds: tuple[int, ...] = THREE
    norm: str = ""
    """The norm placement; empty for that of the recipe."""
    peak: Peak | None = None
    """The learning rate; none for that of the recipe."""
    steps: int = 0
    """Updates, where they are not those of the recipe."""
    tier: int = 0

    def name(self, corpus: str) -> str:
        """The name of its trainings, which differs with all of these."""
        peak = self.peak.describe() if self.peak else ""
        return "-".join(filter(None, (corpus, self.norm, self.variant, peak, f"{self.steps or ''}")))

    @property
    def labels(self) -> dict[str, str | int | float]:
        found: dict[str, str | int | float] = {"variant": self.variant}
        if self.peak:
            rates = {"learning_rate": self.peak.rate, "warmup": self.peak.warmup, "clip": self.peak.clip}
            found |= {"norm": self.norm, **rates}
        return found | ({"steps": self.steps} if self.steps else {})

    @property
    def settings(self) -> tuple[str, ...]:
        """What it changes in the recipe of its corpus, the attention aside."""
        found = recipes.model(norm=self.norm) if self.norm else ()
        found += self.peak.settings if self.peak else ()
        return (*found, *recipes.training(steps=self.steps)) if self.steps else found


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text to train and to test on."""

    name: str
    title: str
    """What a reader is told that it is."""
    folder: str = ""
    """Under the folder of the data; empty for the built-in grammar."""
    text: str = ""
    """What `recipes.CHOICES` calls it; empty where the recipe has all learning rates."""
    settings: tuple[str, ...]
    by_norm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings of single norm placements."""
    test: tuple[str, str] = ("", "")
    rows: tuple[Row, ...]
    form: str = ""
    """One of `FORMS`; empty for text as it is."""
    gold: tuple[Gold, ...] = ()
    measuring: int = 90
    """About how many seconds measuring a model takes on a GPU."""

    def title_in(self, norm: str) -> str:
        """Its title and a norm placement, if that is said."""
        return f"{self.title}, {norm}-norm" if norm else self.title

    def is_chosen(self, labels: Mapping[str, object]) -> bool:
        """Whether a result with these labels is of the learning rate that was chosen, and of the recipe's updates."""
        if not self.text:
            return True
        chosen = choice_of(self.text, str(labels["norm"]), str(labels["variant"])).chosen
        found = (labels["learning_rate"], labels["warmup"], labels["clip"])
        return chosen is not None and found == (chosen.rate, chosen.warmup, chosen.clip) and "steps" not in labels


def chosen_rows(text: str, norm: str, tier: int, variants: tuple[str, ...], seeds: tuple[int, ...]) -> list[Row]:
    """Rows at the learning rates that were chosen; none for variants whose rate is not."""
    choices = {variant: choice_of(text, norm, variant).chosen for variant in variants}
    return [Row(variant=each, seeds=seeds, norm=norm, peak=peak, tier=tier) for each, peak in choices.items() if peak]


def tried_rows(text: str, norm: str, tier: int) -> list[Row]:
    """One row per learning rate that is tried to the end."""
    found = []
    for (of, placement, variant), choice in recipes.CHOICES.items():
        if (of, placement) == (text, norm):
            tried: list[tuple[Peak, tuple[int, ...]]] = [(peak, (choice.seed,)) for peak in choice.tried]
            tried += recipes.EXTRA_TRIED.get((of, placement, variant), ())
            found += [Row(variant=variant, seeds=seeds, norm=norm, peak=peak, tier=tier) for peak, seeds in tried]
    return found


def plain_rows(seeds: Mapping[str, tuple[int, ...]]) -> tuple[Row, ...]:
    """Rows at the learning rate of the recipe; those of `HEADLINE` are trained first."""
    return tuple(Row(variant=name, seeds=each, tier=name not in HEADLINE) for name, each in seeds.items())


def gold_files(stem: str, source: str, target: str) -> tuple[str, str, str]:
    return f"wordalign-gold/{stem}.{source}", f"wordalign-gold/{stem}.{target}", f"wordalign-gold/{stem}.align"


BICICI = Gold(
    name="deen-bicici",
    title="100 en-de sentences linked by hand",
    files=gold_files("deen-bicici", "en", "de"),
    flipped=True,
    aligner="eflomal, a statistical aligner, has 16.2 to 18.8 %.",
)
HANSARDS = Gold(
    name="enfr-hansards",
    title="447 en-fr sentences linked by hand",
    files=gold_files("enfr-hansards", "en", "fr"),
    aligner="eflomal, a statistical aligner, has 6.0 to 7.8 %.",
)
SILVER = Gold(
    name="silver-ende",
    title="1,000 en-de sentences linked by eflomal",
    files=(
        "wordalign-silver-ende/test.tok.en.xz",
        "wordalign-silver-ende/test.tok.de.xz",
        "wordalign-silver-ende/test.align.xz",
    ),
    flipped=True,
    lines=1000,
    aligner="eflomal made these links.",
)
FRENCH_CAPTIONS = recipes.text_files("train.en.xz", "train.fr.xz", "val.en", "val.fr")
FRENCH_SPEECHES = recipes.text_files("train.0.en.xz", "train.0.fr.xz", "valid_long.en.xz", "valid_long.fr.xz")


def published(name: str, source: str, target: str, *more: str) -> Corpus:
    """A corpus of the paper in its own recipe: train, valid and test files, one per language."""
    files = recipes.text_files(f"train.{source}", f"train.{target}", f"valid.{source}", f"valid.{target}")
    test = (f"test.{source}", f"test.{target}")
    settings, title = (*recipes.WMT, *files, *more), name.upper().replace("-", " ", 1)
    return Corpus(name=name, title=title, folder=name, settings=settings, test=test, rows=PAPER_ROWS)


PAIR = EVERY[:2]
"""Every comparison has these two."""
PAPER_ROWS = plain_rows(dict.fromkeys((*HEADLINE, *EVERY[3:]), THREE))
EUROPARL_NORMS = {"pre": recipes.model(attention_dropout=0)}
europarl = partial(
    Corpus, folder="europarl-doc-ende", text="europarl", by_norm=EUROPARL_NORMS, test=("test.en.xz", "test.de.xz")
)
"""A corpus of Europarl, English to German."""
multi30k = partial(Corpus, folder="multi30k", text="multi30k", measuring=20)


CORPORA: dict[str, tuple[Corpus, ...]] = {
    "smoke": (
        Corpus(
            name="grammar",
            title="built-in grammar",
            settings=recipes.GRAMMAR_DOCUMENTS,
            rows=plain_rows(dict.fromkeys(PAIR, ONE)),
            gold=(Gold(name="grammar", title="60 sentences of the grammar"),),
        ),
    ),
    "small": (
        europarl(
            name="europarl-en-de-words",
            title="Europarl en-de in words",
            settings=recipes.EUROPARL_WORDS,
            rows=(
                *tried_rows("europarl", "post", 0),
                *chosen_rows("europarl", "post", 0, PAIR, THREE),
                *chosen_rows("europarl", "pre", 1, PAIR, THREE),
                *(replace(row, steps=20_000) for row in chosen_rows("europarl", "post", 2, PAIR, ONE)),
                *chosen_rows("europarl", "post", 8, OTHERS, ONE),
                *chosen_rows("europarl", "pre", 9, OTHERS, ONE),
                *chosen_rows("europarl", "post", 9, CLAIMED, THREE),
            ),
            form="words",
            gold=(BICICI, SILVER),
        ),
        europarl(
            name="europarl-en-de",
            title="Europarl en-de",
            settings=recipes.EUROPARL_SENTENCES,
            rows=(
                *chosen_rows("europarl", "post", 7, PAIR, THREE),
                *chosen_rows("europarl", "post", 7, ("reluformer",), ONE),
            ),
        ),
        europarl(
            name="europarl-en-fr-words",
            title="Europarl en-fr in words",
            folder="europarl-doc-enfr",
            settings=(*recipes.EUROPARL_WORDS, *FRENCH_SPEECHES),
            test=("valid_long.en.xz", "valid_long.fr.xz"),
            rows=tuple(chosen_rows("europarl", "post", 7, PAIR, THREE)),
            form="words-apart",
            gold=(HANSARDS,),
        ),
        multi30k(
            name="multi30k-de-en",
            title="Multi30k de-en",
            settings=(*recipes.MULTI30K, recipes.COMPILED),
            test=("test_2016_flickr.de", "test_2016_flickr.en"),
            rows=(
                *tried_rows("multi30k", "post", 3),
                *tried_rows("multi30k", "pre", 3),
                *chosen_rows("multi30k", "post", 3, EVERY[:3], THREE),
                *chosen_rows("multi30k", "pre", 3, EVERY[:3], THREE),
            ),
        ),
        multi30k(
            name="multi30k-en-fr",
            title="Multi30k en-fr",
            settings=(*recipes.MULTI30K, recipes.COMPILED, *FRENCH_CAPTIONS),
            test=("test_2016_flickr.en", "test_2016_flickr.fr"),
            rows=(
                *chosen_rows("multi30k", "post", 8, EVERY[:3], THREE),
                *chosen_rows("multi30k", "pre", 8, EVERY[:3], THREE),
            ),
        ),
    ),
    "paper": (
        published("wmt14-en-de", "en", "de"),
        published("wmt14-en-fr", "en", "fr"),
        published("wmt18-en-fi", "en", "fi"),
        published("wmt18-zh-en", "zh", "en", "vocabulary.shared=false"),
        published("wmt16-ro-en", "ro", "en", "training.steps=150000", "model.dropout=0.3"),
        Corpus(
            name="iwslt14-de-en",
            title="IWSLT14 de-en",
            folder="iwslt14",
            settings=recipes.IWSLT14,
            test=("test.de", "test.en"),
            rows=PAPER_ROWS,
        ),
    ),
}
"""The corpora of `translation-quality` at each scale, the most important first."""


def find_corpus(scale: str, name: str) -> Corpus:
    return next(corpus for corpus in CORPORA[scale] if corpus.name == name)


def held_out(scale: Scale) -> list[Pair]:
    """The test set of the studies on single sentences."""
    if scale.data is None:
        return [(pair.source, pair.target) for pair in draw_sentences(SMOKE_TESTS, TEST_SEED, "test")]
    source, target = (str(scale.data / name) for name in SENTENCE_TESTS[scale.name])
    return [(left or "", right or "") for left, right, _ in read_two_files(source, target, DataConfig())]


def held_out_pairs(scale: Scale, corpus: Corpus) -> list[Pair]:
    """The test set of a corpus, in its form, without the lines that start a document."""
    if scale.data is None:
        return [(pair.source, pair.target) for pair in draw_sentences(SMOKE_CORPUS_TESTS, TEST_SEED, "test")]
    source, target = (str(scale.data / corpus.folder / name) for name in corpus.test)
    lines = read_two_files(source, target, DataConfig())
    pairs = [(left or "", right or "") for left, right, _ in lines if left != MARKER]
    if not corpus.form:
        return pairs
    first, second = (name.removesuffix(".xz").rpartition(".")[2] for name in corpus.test)  # the languages
    return [(rewrite(left, corpus.form, first), rewrite(right, corpus.form, second)) for left, right in pairs]


def held_out_documents(scale: Scale) -> list[list[Pair]]:
    """The test set of the studies on documents."""
    if scale.data is None:
        drawn = draw_documents(SMOKE_DOCUMENTS, TEST_SEED, "test")
        return [[(pair.source, pair.target) for pair in document] for document in drawn]
    names = tuple(str(scale.data / name) for name in DOCUMENT_TESTS[scale.name])
    config = DataConfig(valid_source=(names[0],), valid_target=(names[1],), documents="marker")
    found: list[list[Pair]] = []
    for pair in read_pairs(config, "valid", Counts()):
        if pair.document_start:
            found.append([])
        found[-1].append((pair.source, pair.target))
    return found


def gold_pairs(scale: Scale, gold: Gold) -> tuple[list[Pair], list[Links]]:
    """Lowercase sentences, their words separated by spaces, and the links between their words."""
    if scale.data is None:
        drawn = list(draw_sentences(SMOKE_CORPUS_TESTS, TEST_SEED, "test"))
        pairs = [(" ".join(pair.source_words), " ".join(pair.target_words)) for pair in drawn]
        return pairs, [Links(pair.sure, pair.possible) for pair in drawn]
    folder = scale.data
    source, target, links = ([line or "" for line in read_lines(str(folder / name))] for name in gold.files)
    kept = [number for number, line in enumerate(source) if line != MARKER][: gold.lines]
    found = read_gold([links[number] for number in kept], gold.files[2])
    if gold.flipped:
        found = [Links(frozenset(flip(each.sure)), frozenset(flip(each.possible))) for each in found]
    return [(source[number].lower(), target[number].lower()) for number in kept], found


def rewrite(line: str, form: str, language: str) -> str:
    """The words of a line in lowercase, separated by single spaces; in French, contractions are expanded."""
    if line == MARKER:
        return line
    words = FORMS[form][language].findall(line.lower().replace("\u2019", "'"))
    return " ".join(EXPANDED.get(word, word) if language == "fr" else word for word in words)


@contextmanager
def in_form(config: Config, form: str) -> Iterator[Config]:
    """The same configuration with its files rewritten in `form`, which exist until the context ends."""
    if not form:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        data = rename_files(config.data, lambda name: write_rewritten(name, form, Path(folder)))
        yield dataclasses.replace(config, data=data)


def write_rewritten(name: str, form: str, folder: Path) -> str:
    """Rewrite a file into `folder`; its path there."""
    path = folder / Path(name).name.removesuffix(".xz").removesuffix(".gz")
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{rewrite(line or '', form, path.suffix[1:])}\n" for line in read_lines(name))
    return str(path)
