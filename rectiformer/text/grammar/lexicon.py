"""The words of the built-in German-English grammar, one row per word: what inflection cannot know by rule."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class Noun:
    """A noun or, without plural, a name. `kind` decides which verbs and adjectives go with it."""

    german: str
    gender: str  # m, f, n
    plural: str
    english: str
    english_plural: str
    kind: str
    place: str = ""  # preposition that makes it a location
    weak: bool = False  # takes the plural's form in every case but the nominative


@dataclass(frozen=True)
class Verb:
    """A verb with its frame: none, acc, dat, dat acc, goal, place, reflexive, dass, ob."""

    german: str  # infinitive without the separable prefix
    third: str  # third person singular, also without it
    participle: str
    english: str  # a second word is a particle: "pick up"
    past: str
    english_participle: str
    frame: str
    objects: str = ""  # kinds of noun
    subjects: str = "person"
    prefix: str = ""
    auxiliary: str = "haben"
    stative: bool = False  # no manner, no passive, no imperative


@dataclass(frozen=True)
class Adjective:
    """An adjective for nouns of some kinds. `stem` takes the endings."""

    german: str
    stem: str
    english: str
    kinds: str
    passing: bool = False  # may be true today only


@dataclass(frozen=True)
class Determiner:
    """What opens a noun phrase. `kind` is "der", "ein" or "number", and decides the endings."""

    stem: str
    kind: str
    english: str
    english_plural: str


@dataclass(frozen=True)
class Adverbial:
    """A time, frequency or manner. English word i translates the German word `order[i]`."""

    german: str
    english: str
    order: tuple[int, ...]
    modes: str  # of present, perfect, modal, passive
    role: str = "time"  # or "habit"; "frequency", which stands before the English verb; "manner"
    past: bool = False  # a perfect with it is an English simple past


@dataclass(frozen=True)
class Preposition:
    """A preposition and the case it governs here."""

    german: str
    english: str
    case: str


THINGS = "thing opening device vehicle food text building term"
BEINGS = "person animal"
Row = TypeVar("Row")


def read_rows(name: str, row: type[Row]) -> tuple[Row, ...]:
    """The rows of a table next to this file, whose first line names fields; an empty cell is the field's default."""
    with Path(__file__).with_name(name).open(encoding="utf-8") as file:
        found = csv.DictReader(file, delimiter="\t")
        return tuple(row(**{field: parse_cell(cell) for field, cell in cells.items() if cell}) for cells in found)


def parse_cell(cell: str) -> str | bool | tuple[int, ...]:
    """A flag is "yes", an order of words "0 2 1"; BEINGS and THINGS are the kinds above."""
    if cell[0].isdigit():
        return tuple(int(digit) for digit in cell.split())
    return cell == "yes" or cell.replace("BEINGS", BEINGS).replace("THINGS", THINGS)


NOUNS = read_rows("nouns.tsv", Noun)
VERBS = read_rows("verbs.tsv", Verb)
ADJECTIVES = read_rows("adjectives.tsv", Adjective)
ADVERBIALS = read_rows("adverbials.tsv", Adverbial)

NEVER_OWNED = ("Mann", "Frau")  # "meine Frau" is a wife

NAMES = (
    Noun("Anna", "f", "", "Anna", "", "person"),
    Noun("Clara", "f", "", "Clara", "", "person"),
    Noun("Max", "m", "", "Max", "", "person"),
    Noun("Paul", "m", "", "Paul", "", "person"),
)

# A noun of two senses, and for each sense a noun of the same gender that says which one it is.
TERMS = (
    (Noun("Bank", "f", "", "bench", "", "term"), Noun("Gartenbank", "f", "", "garden bench", "", "thing")),
    (Noun("Bank", "f", "", "bank", "", "term"), Noun("Firma", "f", "", "company", "", "thing")),
    (Noun("Schloss", "n", "", "castle", "", "term"), Noun("Gebäude", "n", "", "building", "", "thing")),
    (Noun("Schloss", "n", "", "lock", "", "term"), Noun("Gerät", "n", "", "device", "", "thing")),
    (Noun("Birne", "f", "", "pear", "", "term"), Noun("Frucht", "f", "", "fruit", "", "thing")),
    (Noun("Birne", "f", "", "bulb", "", "term"), Noun("Lampe", "f", "", "lamp", "", "thing")),
    (Noun("Hahn", "m", "", "rooster", "", "term"), Noun("Vogel", "m", "", "bird", "", "thing")),
    (Noun("Hahn", "m", "", "tap", "", "term"), Noun("Wasserhahn", "m", "", "water tap", "", "thing")),
)

THE = Determiner("d", "der", "the", "the")
THIS = Determiner("dies", "der", "this", "these")
A = Determiner("ein", "ein", "a", "")
NO = Determiner("kein", "ein", "no", "no")
MY = Determiner("mein", "ein", "my", "my")
OUR = Determiner("unser", "ein", "our", "our")
NUMBERS = (
    Determiner("zwei", "number", "two", "two"),
    Determiner("drei", "number", "three", "three"),
    Determiner("vier", "number", "four", "four"),
)

PLACES = {
    "in": Preposition("in", "in", "dat"),
    "an": Preposition("an", "at", "dat"),
    "auf": Preposition("auf", "on", "dat"),
}
BEFORE = Preposition("vor", "in front of", "dat")
BEHIND = Preposition("hinter", "behind", "dat")
INTO = Preposition("in", "into", "acc")
TO = Preposition("zu", "to", "dat")
BY = Preposition("von", "by", "dat")

STATEMENT_PARTICLES = ("ja", "doch", "eben")
REASONS = (("weil", "because"), ("obwohl", "although"))
OCCASIONS = (("wenn", "when"), ("bevor", "before"))
QUESTION_WORDS = (("wann", "when"), ("wo", "where"), ("warum", "why"))
