"""Random phrases and clauses of the grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from rectiformer.text.grammar import lexicon
from rectiformer.text.grammar.clauses import Clause, Location, NounPhrase, Phrase, PronounPhrase
from rectiformer.text.grammar.lexicon import (
    FIRST,
    FIRST_PLURAL,
    GIRL,
    HE,
    IT,
    MODALS,
    SHE,
    THEY,
    Adjective,
    Adverbial,
    Determiner,
    Noun,
    Pronoun,
    Verb,
)

Item = TypeVar("Item")

# An entry that is listed twice is drawn twice as often.
DEFINITE = (lexicon.THE, lexicon.THE, lexicon.THE, lexicon.THIS, lexicon.MY, lexicon.OUR)
SINGULAR = (*DEFINITE, lexicon.A, lexicon.A)
PLURAL = (*DEFINITE, *lexicon.NUMBERS)
FRAMES = ("acc",) * 7 + ("dat acc",) * 2 + ("none", "dat", "goal", "reflexive", "be", "passive", "passive", "place")
SHORT_FRAMES = ("acc",) * 5 + ("none", "none", "dat", "goal", "reflexive", "be", "be")
PREDICATE_FRAMES = ("be", "be", "passive")  # all that a thing can do
SITES = tuple(noun for noun in lexicon.NOUNS if noun.place)
MODES = ("present", "perfect", "modal")


class Dice:
    """The choices of one sentence, and the keys of its phrases. Equal seeds give equal choices on every machine."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random
        self._key = 0

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items, each as likely as the others."""
        return items[int(self._random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def key(self) -> int:
        """The first of ten keys that are unique in the sentence."""
        self._key += 10
        return self._key


@cache
def nouns_of(kinds: str) -> tuple[Noun, ...]:
    """Nouns of any of the kinds."""
    return tuple(noun for noun in lexicon.NOUNS if noun.kind in kinds.split())


@cache
def adjectives_of(kind: str) -> tuple[Adjective, ...]:
    """Adjectives that suit nouns of the kind."""
    return tuple(adjective for adjective in lexicon.ADJECTIVES if kind in adjective.kinds.split())


@cache
def verbs_of(frame: str, subject: str = "", objects: str = "", active: bool = False) -> tuple[Verb, ...]:
    """Verbs of a frame that take a kind of subject and of object, if given; without stative ones if `active`."""
    return tuple(
        verb
        for verb in lexicon.VERBS
        if verb.frame == frame
        and (not subject or subject in verb.subjects.split())
        and (not objects or objects in verb.objects.split())
        and not (active and verb.stative)
    )


@cache
def adverbials_of(mode: str, roles: str) -> tuple[Adverbial, ...]:
    """Adverbials that go with a mode and have one of the roles."""
    return tuple(row for row in lexicon.ADVERBIALS if mode in row.modes.split() and row.role in roles.split())


def anaphor(phrase: Phrase) -> Pronoun:
    """The pronoun that refers back to the phrase: "er" is he for a man and it for a table."""
    if isinstance(phrase, PronounPhrase):
        return phrase.pronoun
    assert isinstance(phrase, NounPhrase)
    noun = phrase.noun
    if phrase.plural:
        return THEY
    return {"m": HE, "f": SHE, "n": GIRL}[noun.gender] if noun.kind == "person" else IT[noun.gender]


def kind_of(phrase: Phrase) -> str:
    """The kind of the noun; pronouns that are drawn freely are persons."""
    return phrase.noun.kind if isinstance(phrase, NounPhrase) else "person"


def draw_noun_phrase(
    dice: Dice, nouns: Sequence[Noun], determiners: Sequence[Determiner] = (), adjective: float = 0.25
) -> NounPhrase:
    """A noun phrase, singular if `determiners` are given, sometimes with an adjective."""
    noun = dice.pick(nouns)
    plural = not determiners and dice.chance(0.25)
    determiner = dice.pick(determiners or (PLURAL if plural else SINGULAR))
    if noun.german in lexicon.NEVER_OWNED and determiner in (lexicon.MY, lexicon.OUR):
        determiner = lexicon.THE
    attribute = dice.pick(adjectives_of(noun.kind)) if dice.chance(adjective) else None
    return NounPhrase(dice.key(), noun, determiner, plural, attribute)


def draw_subject(dice: Dice, kinds: str) -> Phrase:
    """Who acts. A lone er or sie only where nothing but a person can act, so that it means he or she."""
    if "person" in kinds and dice.chance(0.3):
        return PronounPhrase(
            dice.key(), dice.pick((FIRST, FIRST_PLURAL, THEY, *((HE, SHE) if kinds == "person" else ())))
        )
    if "person" in kinds and dice.chance(0.12):
        return NounPhrase(dice.key(), dice.pick(lexicon.NAMES))
    return draw_noun_phrase(dice, nouns_of(kinds))


def draw_object(dice: Dice, kinds: str, subject: Phrase, determiners: Sequence[Determiner]) -> Phrase:
    """Whom or what it is done to: never the subject itself."""
    person = "person" in kinds.split()
    first = isinstance(subject, PronounPhrase) and subject.pronoun in (FIRST, FIRST_PLURAL)
    if person and not first and dice.chance(0.12):
        return PronounPhrase(dice.key(), dice.pick((FIRST, FIRST_PLURAL)))
    if person and dice.chance(0.1):
        phrase = NounPhrase(dice.key(), dice.pick(lexicon.NAMES))
    else:
        phrase = draw_noun_phrase(dice, nouns_of(kinds), determiners)
    same = isinstance(subject, NounPhrase) and subject.noun is phrase.noun
    return draw_object(dice, kinds, subject, determiners) if same else phrase


def draw_goal(dice: Dice) -> Location:
    """Where to: "ins Haus", "zur Schule"."""
    phrase = draw_noun_phrase(dice, SITES, DEFINITE, 0.2)
    return Location(
        dice.key(), dice.pick((lexicon.TO, lexicon.INTO) if phrase.noun.place == "in" else (lexicon.TO,)), phrase
    )


def draw_location(dice: Dice) -> Location:
    """Where: in, at or on a place, or in front of or behind a building."""
    phrase = draw_noun_phrase(dice, SITES, SINGULAR, 0.2)
    own = lexicon.PLACES[phrase.noun.place]
    around = (lexicon.BEFORE, lexicon.BEHIND) if phrase.noun.kind == "building" else ()
    return Location(dice.key(), dice.pick((own, own, *around)), phrase)


def draw_adverbial(dice: Dice, mode: str, negated: bool, manner: bool) -> Adverbial | None:
    """A time, frequency or manner, or none. Negation goes with times only."""
    if not dice.chance(0.5):
        return None
    roles = "time" if negated else "time habit frequency manner" if manner else "time habit frequency"
    return dice.pick(adverbials_of(mode, roles))


def draw_state(dice: Dice, subject: Phrase | None = None, kind: str = "", negatable: bool = True) -> Clause:
    """What someone or something is like."""
    phrase = subject or draw_subject(dice, f"{lexicon.BEINGS} {lexicon.THINGS}")
    negated = negatable and dice.chance(0.2)
    predicate = dice.pick(adjectives_of(kind or kind_of(phrase)))
    adverbial = draw_adverbial(dice, "present", negated, manner=False) if predicate.passing else None
    if isinstance(phrase, NounPhrase) and predicate == phrase.adjective:
        return draw_state(dice, subject, kind, negatable)
    return Clause(dice.key(), phrase, adverbial=adverbial, predicate=predicate, negated=negated)


def draw_passive(dice: Dice, subject: Phrase | None = None, kind: str = "", agent: bool = True) -> Clause:
    """What is done to someone or something, and by whom."""
    verb = dice.pick(verbs_of("acc", objects=kind, active=True))
    phrase = subject or draw_noun_phrase(dice, nouns_of(verb.objects))
    adverbial = draw_adverbial(dice, "passive", negated=False, manner=True)
    by = None
    if agent:
        person = (
            NounPhrase(dice.key(), dice.pick(lexicon.NAMES))
            if dice.chance(0.2)
            else draw_noun_phrase(dice, nouns_of("person"))
        )
        by = Location(dice.key(), lexicon.BY, person)
    return Clause(dice.key(), phrase, verb, "passive", adverbial=adverbial, location=by)


def draw_action(
    dice: Dice,
    frame: str,
    subject: Phrase | None = None,
    kind: str = "",
    direct: Phrase | None = None,
    direct_kind: str = "",
    short: bool = False,
    negatable: bool = True,
    modes: Sequence[str] = MODES,
) -> Clause:
    """What someone does.

    Args:
        kind: that of the subject, if a pronoun hides it.
        direct: the object, of `direct_kind`, instead of a random one.
        short: without a location.
    """
    verb = dice.pick(verbs_of(frame, kind, direct_kind))
    subject = subject or draw_subject(dice, verb.subjects)
    mode = dice.pick(modes)
    if mode == "present" and subject.number == 0:
        mode = "perfect"  # each verb's form for ich would be too rare to learn
    modal = dice.pick(MODALS) if mode == "modal" else None
    negated = negatable and dice.chance(0.2) and (modal is None or modal.negatable)
    adverbial = draw_adverbial(dice, mode, negated, manner=not verb.stative)
    determiners: Sequence[Determiner] = DEFINITE if negated else ()
    if negated and frame == "acc" and modal is None and direct is None and dice.chance(0.5):
        determiners, negated = (lexicon.NO,), False  # "kein" negates alone
    if "acc" in frame and direct is None:
        direct = draw_object(dice, verb.objects, subject, determiners)
    indirect = None
    if "dat" in frame:
        indirect = draw_object(dice, verb.objects if frame == "dat" else "person", subject, determiners)
    location = None
    if frame == "goal":
        location = draw_goal(dice)
    elif frame == "place" or not (short or negated or (adverbial and adverbial.role == "manner") or dice.chance(0.65)):
        location = draw_location(dice)
    return Clause(dice.key(), subject, verb, mode, modal, direct, indirect, adverbial, location, negated=negated)


def draw_clause(
    dice: Dice, frames: Sequence[str] = FRAMES, subject: Phrase | None = None, kind: str = "", short: bool = False
) -> Clause:
    """A clause of one of the frames, including "be" and "passive", about `subject` if given."""
    frame = dice.pick(frames)
    if frame == "be":
        return draw_state(dice, subject, kind)
    if frame == "passive":
        return draw_passive(dice, subject, kind)
    return draw_action(dice, frame, subject, kind, short=short)
