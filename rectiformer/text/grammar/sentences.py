"""Random sentences: phrases, clauses, and statements, questions and commands made of them."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.text.grammar import clauses, lexicon
from rectiformer.text.grammar.clauses import Clause, Location, NounPhrase, Pair, Phrase, PronounPhrase, Word, pair_words

Item = TypeVar("Item")

# An entry that is listed twice is drawn twice as often.
DEFINITE = (lexicon.THE, lexicon.THE, lexicon.THE, lexicon.THIS, lexicon.MY, lexicon.OUR)
SINGULAR = (*DEFINITE, lexicon.A, lexicon.A)
PLURAL = (*DEFINITE, *lexicon.NUMBERS)
FRAMES = ("acc",) * 7 + ("dat acc",) * 2 + ("none", "dat", "goal", "reflexive", "be", "passive", "passive", "place")
SHORT_FRAMES = ("acc",) * 5 + ("none", "none", "dat", "goal", "reflexive", "be", "be")
PREDICATE_FRAMES = ("be", "be", "passive")  # all that a thing can do
SITES = tuple(noun for noun in lexicon.NOUNS if noun.preposition)
MODES = ("present", "perfect", "modal")
GOALS = (lexicon.TO, lexicon.INTO)
SPEAKERS = (lexicon.FIRST, lexicon.FIRST_PLURAL)
CONJUNCTION = (-3,)  # the keys of what opens a clause


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
def nouns_of(kinds: str) -> tuple[lexicon.Noun, ...]:
    """Nouns of any of the kinds."""
    return tuple(noun for noun in lexicon.NOUNS if noun.kind in kinds.split())


@cache
def adjectives_of(kind: str) -> tuple[lexicon.Adjective, ...]:
    """Adjectives that suit nouns of the kind."""
    return tuple(adjective for adjective in lexicon.ADJECTIVES if kind in adjective.kinds.split())


@cache
def verbs_of(frame: str, subject: str = "", objects: str = "", active: bool = False) -> tuple[lexicon.Verb, ...]:
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
def adverbials_of(mode: str, roles: str) -> tuple[lexicon.Adverbial, ...]:
    """Adverbials that go with a mode and have one of the roles."""
    return tuple(row for row in lexicon.ADVERBIALS if mode in row.modes.split() and row.role in roles.split())


def anaphor(phrase: Phrase) -> lexicon.Pronoun:
    """The pronoun that refers back to the phrase."""
    if isinstance(phrase, PronounPhrase):
        return phrase.pronoun
    return lexicon.THEY if phrase.plural else lexicon.personal_pronoun(phrase.noun)


def kind_of(phrase: Phrase) -> str:
    """The kind of the noun; pronouns that are drawn freely are persons."""
    return phrase.noun.kind if isinstance(phrase, NounPhrase) else "person"


def draw_noun_phrase(
    dice: Dice, nouns: Sequence[lexicon.Noun], determiners: Sequence[lexicon.Determiner] = (), adjective: float = 0.25
) -> NounPhrase:
    """A noun phrase, singular if `determiners` are given, sometimes with an adjective."""
    noun = dice.pick(nouns)
    plural = not determiners and dice.chance(0.25)
    determiner = dice.pick(determiners or (PLURAL if plural else SINGULAR))
    if noun.german in lexicon.NEVER_OWNED and determiner in (lexicon.MY, lexicon.OUR):
        determiner = lexicon.THE
    attribute = dice.pick(adjectives_of(noun.kind)) if dice.chance(adjective) else None
    return NounPhrase(dice.key(), noun, determiner, plural, attribute)


def draw_name_or_noun(
    dice: Dice, kinds: str, name: float, determiners: Sequence[lexicon.Determiner] = ()
) -> NounPhrase:
    """A noun phrase of these kinds; where a person is among them, a name with the probability `name`."""
    if "person" in kinds.split() and dice.chance(name):
        return NounPhrase(dice.key(), dice.pick(lexicon.NAMES))
    return draw_noun_phrase(dice, nouns_of(kinds), determiners)


def draw_subject(dice: Dice, kinds: str) -> Phrase:
    """Who acts. A lone er or sie only where nothing but a person can act, so that it means he or she."""
    if "person" in kinds and dice.chance(0.3):
        pronouns = (*SPEAKERS, lexicon.THEY, *((lexicon.HE, lexicon.SHE) if kinds == "person" else ()))
        return PronounPhrase(dice.key(), dice.pick(pronouns))
    return draw_name_or_noun(dice, kinds, 0.12)


def draw_object(dice: Dice, kinds: str, subject: Phrase, determiners: Sequence[lexicon.Determiner]) -> Phrase:
    """Whom or what it is done to: never the subject itself."""
    first = isinstance(subject, PronounPhrase) and subject.pronoun in SPEAKERS
    if "person" in kinds.split() and not first and dice.chance(0.12):
        return PronounPhrase(dice.key(), dice.pick(SPEAKERS))
    phrase = draw_name_or_noun(dice, kinds, 0.1, determiners)
    same = isinstance(subject, NounPhrase) and subject.noun is phrase.noun
    return draw_object(dice, kinds, subject, determiners) if same else phrase


def draw_goal(dice: Dice) -> Location:
    """Where to: "ins Haus", "zur Schule"."""
    phrase = draw_noun_phrase(dice, SITES, DEFINITE, 0.2)
    return Location(dice.key(), dice.pick(GOALS if phrase.noun.preposition == "in" else (lexicon.TO,)), phrase)


def draw_location(dice: Dice) -> Location:
    """Where: in, at or on a place, or in front of or behind a building."""
    phrase = draw_noun_phrase(dice, SITES, SINGULAR, 0.2)
    own = lexicon.LOCATIONS[phrase.noun.preposition]
    around = (lexicon.BEFORE, lexicon.BEHIND) if phrase.noun.kind == "building" else ()
    return Location(dice.key(), dice.pick((own, own, *around)), phrase)


def draw_adverbial(dice: Dice, mode: str, negated: bool, manner: bool) -> lexicon.Adverbial | None:
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
    by = Location(dice.key(), lexicon.BY, draw_name_or_noun(dice, "person", 0.2)) if agent else None
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
    modal = dice.pick(lexicon.MODALS) if mode == "modal" else None
    negated = negatable and dice.chance(0.2) and (modal is None or modal.negatable)
    adverbial = draw_adverbial(dice, mode, negated, manner=not verb.stative)
    determiners: Sequence[lexicon.Determiner] = DEFINITE if negated else ()
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


def draw_sentences(count: int, seed: int, split: str = "train") -> Iterator[Pair]:
    """`count` sentence pairs; pair i depends only on seed, split and i. No two splits share a sentence."""
    check_request(count, split)
    return (draw_sentence(Dice(f"sentence {seed} {split} {index}"), split) for index in range(count))


def check_request(count: int, split: str) -> None:
    """Raise an ArgumentError for a negative count or an unknown split."""
    if count < 0:
        raise ArgumentError(f"count = {count} is negative; ask for 0 or more")
    if split not in clauses.SPLITS:
        raise ArgumentError(unknown_name("split", split, clauses.SPLITS))


def draw_sentence(dice: Dice, split: str) -> Pair:
    """A sentence of any form that belongs to the split."""
    while not clauses.fits(pair := dice.pick(FORMS)(dice), split):
        pass
    return pair


def draw_statement(dice: Dice) -> Pair:
    """A main clause that starts with any constituent that leaves the roles clear."""
    clause = draw_clause(dice)
    if dice.chance(0.15):
        clause = replace(clause, particle=dice.pick(lexicon.STATEMENT_PARTICLES))
    front = dice.pick(("subject", *fronts(clause)))
    return pair_words(clause.german("second", front), clause.english(early=front == "adverbial"))


def fronts(clause: Clause) -> list[str]:
    """Constituents that may precede the verb instead of the subject; goals and "kein" sound odd there."""
    roles = ["location"] if clause.location is not None and clause.location.preposition not in GOALS else []
    if clause.adverbial is not None and clause.adverbial.role in ("time", "habit"):
        roles.append("adverbial")
    if isinstance(clause.indirect, NounPhrase) and clause.indirect.determiner not in (None, *lexicon.NUMBERS):
        roles.append("indirect")
    clear = is_marked(clause.subject) or (clause.direct is not None and is_marked(clause.direct))
    if clear and isinstance(clause.direct, NounPhrase) and clause.direct.determiner != lexicon.NO:
        roles.append("direct")
    return roles


def is_marked(phrase: Phrase) -> bool:
    """Whether nominative and accusative differ, so that the phrase shows its role in any position."""
    if isinstance(phrase, PronounPhrase):
        return phrase.pronoun.nom != phrase.pronoun.acc
    return phrase.gender == "m" and phrase.determiner is not None


def draw_question(dice: Dice) -> Pair:
    """A yes-no question that starts with an auxiliary."""
    frame, modes = dice.pick(SHORT_FRAMES), ("perfect", "modal")
    be = frame == "be"
    clause = draw_state(dice, negatable=False) if be else draw_action(dice, frame, negatable=False, modes=modes)
    clause = replace(clause, particle="denn" if dice.chance(0.3) else "")
    return pair_words(clause.german("first"), clause.english(inverted=True), "?")


def draw_word_question(dice: Dice) -> Pair:
    """A question for time, place or reason, where a German perfect becomes an English simple past."""
    german, english = dice.pick(lexicon.QUESTION_WORDS)
    clause = draw_action(dice, dice.pick(("acc", "acc", "dat", "dat acc", "none")), short=True, negatable=False)
    clause = replace(clause, adverbial=None, particle="denn" if dice.chance(0.3) else "")
    asked = [Word(german, CONJUNCTION), *clause.german("first")]
    return pair_words(asked, [Word(english, CONJUNCTION), *clause.english(inverted=True, past=True)], "?")


def draw_command(dice: Dice) -> Pair:
    """A command to one person."""
    frame = dice.pick(("acc", "acc", "acc", "dat", "dat acc"))
    verb = dice.pick(verbs_of(frame, active=True))
    negated = dice.chance(0.2)
    particle = "bitte" if negated else dice.pick(("bitte", "bitte", "mal", "doch"))
    listener = PronounPhrase(dice.key(), lexicon.SECOND)
    determiners = (lexicon.THE, lexicon.THIS, lexicon.MY) if negated else ()
    direct = draw_object(dice, verb.objects, listener, determiners) if "acc" in frame else None
    receivers = verb.objects if frame == "dat" else "person"
    indirect = draw_object(dice, receivers, listener, determiners) if "dat" in frame else None
    adverbial = dice.pick(adverbials_of("modal", "time")) if dice.chance(0.4) else None
    clause = Clause(
        dice.key(), listener, verb, "imperative", None, direct, indirect, adverbial, None, None, negated, particle
    )
    return pair_words(clause.german("first"), clause.english(), "!")


def draw_second(dice: Dice, first: Clause) -> Clause:
    """A clause that follows another, mostly about the same subject if its pronoun is unambiguous."""
    if dice.chance(0.6) and is_clear(first):
        kind = kind_of(first.subject)
        frames = SHORT_FRAMES if kind in lexicon.BEINGS.split() else PREDICATE_FRAMES
        second = draw_clause(dice, frames, PronounPhrase(dice.key(), anaphor(first.subject)), kind, short=True)
    else:
        second = draw_clause(dice, SHORT_FRAMES, short=True)
        if isinstance(second.subject, PronounPhrase) and second.subject.pronoun not in SPEAKERS:
            return draw_second(dice, first)  # er or sie would seem to refer to the first clause
    repeats = second.predicate is not None and second.predicate == first.predicate
    return draw_second(dice, first) if repeats else second


def is_clear(clause: Clause) -> bool:
    """Whether the subject's pronoun fits no other phrase of the clause that has another English pronoun."""
    pronoun = anaphor(clause.subject)
    phrases = [clause.direct, clause.indirect, clause.location.phrase if clause.location else None]
    others = [anaphor(phrase) for phrase in phrases if phrase is not None]
    return not any(
        (other.nom, other.number) == (pronoun.nom, pronoun.number) and other.subject != pronoun.subject
        for other in others
    )


def draw_conjunction(dice: Dice, *joined: Clause) -> tuple[Word, Word]:
    """A conjunction, temporal ones only between clauses that are not in the perfect."""
    perfect = any(clause.mode == "perfect" for clause in joined)
    german, english = dice.pick(lexicon.REASONS if perfect else lexicon.REASONS + lexicon.OCCASIONS)
    return Word(german, CONJUNCTION), Word(english, CONJUNCTION)


def draw_subordinate_last(dice: Dice) -> Pair:
    """A main clause and a verb-final one. English has no comma there."""
    main = draw_clause(dice, SHORT_FRAMES, short=True)
    second = draw_second(dice, main)
    german, english = draw_conjunction(dice, main, second)
    source = [*main.german(), clauses.COMMA, german, *second.german("last")]
    return pair_words(source, [*main.english(), english, *second.english()])


def draw_subordinate_first(dice: Dice) -> Pair:
    """A verb-final clause in front of the main verb."""
    first = draw_clause(dice, SHORT_FRAMES, short=True)
    main = draw_second(dice, first)
    german, english = draw_conjunction(dice, first, main)
    source = [german, *first.german("last"), clauses.LINKED_COMMA, *main.german("first")]
    return pair_words(source, [english, *first.english(), clauses.LINKED_COMMA, *main.english()])


def draw_reported(dice: Dice) -> Pair:
    """What someone thinks, says or asks."""
    frame = dice.pick(("dass", "dass", "ob"))
    outer = Clause(dice.key(), draw_subject(dice, "person"), dice.pick(verbs_of(frame)))
    return report(outer, draw_clause(dice, SHORT_FRAMES))


def report(outer: Clause, inner: Clause) -> Pair:
    """Join a clause to the verb that reports it."""
    german, english = ("ob", "whether") if outer.verb and outer.verb.frame == "ob" else ("dass", "that")
    source = [*outer.german(), clauses.COMMA, Word(german, CONJUNCTION), *inner.german("last")]
    return pair_words(source, [*outer.english(), Word(english, CONJUNCTION), *inner.english()])


def draw_relative(dice: Dice) -> Pair:
    """A statement about someone or something that a relative clause identifies."""
    head = draw_noun_phrase(dice, nouns_of(f"{lexicon.BEINGS} thing text"), adjective=0.2)
    kind = head.noun.kind
    pronoun = PronounPhrase(dice.key(), lexicon.relative_pronoun(head.number, head.gender, kind == "person"))
    being = kind in lexicon.BEINGS.split()
    if being and not (head.gender == "m" and dice.chance(0.5)):
        clause = draw_action(dice, dice.pick(("acc", "none")), pronoun, kind, short=True)
        relative = clause.german("last"), clause.english()
    elif head.gender == "m":
        clause = replace(draw_action(dice, "acc", direct=head, direct_kind=kind, short=True), direct=None)
        relative = [*pronoun.german("acc"), *clause.german("last")], [*pronoun.english(), *clause.english()]
    else:
        return draw_relative(dice)
    frames = ("none", "be", "be") if being else PREDICATE_FRAMES
    main = draw_clause(dice, frames, replace(head, relative=relative), kind, short=True)
    return pair_words(main.german(), main.english())


def draw_coordinate(dice: Dice) -> Pair:
    """Two main clauses."""
    first = draw_clause(dice, SHORT_FRAMES, short=True)
    second = draw_second(dice, first)
    german, english = dice.pick((("aber", "but"), ("und", "and")))
    comma = [clauses.LINKED_COMMA] if german == "aber" else []
    source = [*first.german(), *comma, Word(german, CONJUNCTION), *second.german()]
    return pair_words(source, [*first.english(), *comma, Word(english, CONJUNCTION), *second.english()])


FORMS: tuple[Callable[[Dice], Pair], ...] = (
    *(draw_statement,) * 6,
    draw_question,
    draw_word_question,
    draw_command,
    *(draw_subordinate_last,) * 3,
    *(draw_subordinate_first,) * 3,
    *(draw_reported,) * 2,
    *(draw_relative,) * 2,
    draw_coordinate,
)
