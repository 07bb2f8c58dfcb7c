"""The words of the grammar and their forms: tables of words, and rules for endings, cases, persons and tenses.

Nouns, verbs, adjectives and adverbials are TSV files next to this one.
"""

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
    preposition: str = ""  # that makes it a location
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


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun. `number` indexes verb forms: 0 ich, 1 er, 2 wir."""

    number: int
    nom: str
    acc: str
    dat: str
    reflexive: str
    subject: str
    object: str


@dataclass(frozen=True)
class Modal:
    """A verb that sends an infinitive to the end of the clause, in the forms for ich, er, wir."""

    forms: tuple[str, str, str]
    english: str
    negatable: bool = True  # "muss nicht" is not "must not"


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

GIVEN_NAMES = (("Anna", "f"), ("Clara", "f"), ("Max", "m"), ("Paul", "m"))
NAMES = tuple(Noun(name, gender, "", name, "", "person") for name, gender in GIVEN_NAMES)

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

LOCATIONS = {
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

FIRST = Pronoun(0, "ich", "mich", "mir", "mich", "I", "me")
FIRST_PLURAL = Pronoun(2, "wir", "uns", "uns", "uns", "we", "us")
SECOND = Pronoun(1, "du", "dich", "dir", "dich", "you", "you")  # whom commands are for; never said
HE = Pronoun(1, "er", "ihn", "ihm", "sich", "he", "him")
SHE = Pronoun(1, "sie", "sie", "ihr", "sich", "she", "her")
THEY = Pronoun(2, "sie", "sie", "ihnen", "sich", "they", "them")
IT = {
    "m": Pronoun(1, "er", "ihn", "ihm", "sich", "it", "it"),
    "f": Pronoun(1, "sie", "sie", "ihr", "sich", "it", "it"),
    "n": Pronoun(1, "es", "es", "ihm", "sich", "it", "it"),
}
PERSON = {"m": HE, "f": SHE, "n": Pronoun(1, "es", "es", "ihm", "sich", "she", "her")}  # "es" is a girl

MODALS = (
    Modal(("kann", "kann", "können"), "can"),
    Modal(("muss", "muss", "müssen"), "must", negatable=False),
    Modal(("soll", "soll", "sollen"), "should"),
    Modal(("will", "will", "wollen"), "want to"),
    Modal(("möchte", "möchte", "möchten"), "would like to"),
    Modal(("werde", "wird", "werden"), "will"),
)
AUXILIARIES = {
    "haben": ("habe", "hat", "haben"),
    "sein": ("bin", "ist", "sind"),
    "werden": ("werde", "wird", "werden"),
}
BE = ("am", "is", "are")
HAVE = ("have", "has", "have")
DO = ("do", "does", "do")

# By case, then by gender or "p" for plural.
ARTICLES = {
    "nom": {"m": "der", "f": "die", "n": "das", "p": "die"},
    "acc": {"m": "den", "f": "die", "n": "das", "p": "die"},
    "dat": {"m": "dem", "f": "der", "n": "dem", "p": "den"},
}
ENDINGS = {
    "nom": {"m": "er", "f": "e", "n": "es", "p": "e"},
    "acc": {"m": "en", "f": "e", "n": "es", "p": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "p": "en"},
}
MERGED = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
}


def determiner_form(determiner: Determiner, case: str, gender: str) -> str:
    """The German determiner; `gender` is "p" for plural."""
    if determiner.stem == "d":
        return ARTICLES[case][gender]
    if determiner.kind == "number" or (determiner.kind == "ein" and bare(case, gender)):
        return determiner.stem
    return determiner.stem + ENDINGS[case][gender]


def bare(case: str, gender: str) -> bool:
    """Whether "ein" has no ending, so that the adjective after it must show gender."""
    return (case, gender) in (("nom", "m"), ("nom", "n"), ("acc", "n"))


def adjective_form(adjective: Adjective, kind: str, case: str, gender: str) -> str:
    """The German adjective after a determiner of `kind`."""
    if (kind == "ein" and bare(case, gender)) or (kind == "number" and case != "dat"):
        return adjective.stem + ENDINGS[case][gender]
    weak = gender != "p" and case != "dat" and (case, gender) != ("acc", "m")
    return adjective.stem + ("e" if weak else "en")


def personal_pronoun(noun: Noun) -> Pronoun:
    """The pronoun that refers back to a noun in the singular: "er" is he for a man and it for a table."""
    return (PERSON if noun.kind == "person" else IT)[noun.gender]


def relative_pronoun(number: int, gender: str, person: bool) -> Pronoun:
    """The pronoun that opens a clause about a noun of this number and gender, or about a person."""
    nominative, accusative, dative = (ARTICLES[case][gender] for case in ("nom", "acc", "dat"))
    return Pronoun(number, nominative, accusative, dative, "sich", "who" if person else "that", "that")


def noun_form(noun: Noun, case: str, plural: bool) -> str:
    """The German noun."""
    if plural:
        return noun.plural + ("n" if case == "dat" and noun.plural[-1] not in "ns" else "")
    return noun.plural if noun.weak and case != "nom" else noun.german


def present_form(verb: Verb, number: int) -> str:
    """The finite German verb without its prefix, for ich, er, wir."""
    return (f"{verb.german[:-2]}e", verb.third, verb.german)[number]


def imperative_form(verb: Verb) -> str:
    """The German command to one person, without prefix: "sieh", "arbeite", "mach"."""
    stem = verb.german[:-2]
    if "i" in verb.third and "i" not in stem:
        return verb.third[:-1]
    return stem + ("e" if stem.endswith(("t", "d", "ier")) else "")


def third_person(verb: str) -> str:
    """The English verb with its -s."""
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "o")) else "s")
