"""German and English word forms: endings, cases, persons and tenses."""

from __future__ import annotations

from dataclasses import dataclass

from rectiformer.text.grammar.lexicon import Adjective, Determiner, Noun, Verb


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
GIRL = Pronoun(1, "es", "es", "ihm", "sich", "she", "her")

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


def indefinite_article(word: str) -> str:
    """The English indefinite article before `word`."""
    return "an" if word[0] in "aeiou" else "a"
