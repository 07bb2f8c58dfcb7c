"""Finished sentence pairs, and the forms they take: statements, questions, commands, clauses within clauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.text.grammar import lexicon
from rectiformer.text.grammar.clauses import (
    COMMA,
    LINKED_COMMA,
    Clause,
    NounPhrase,
    Phrase,
    PronounPhrase,
    RelativePhrase,
    Word,
    Words,
)
from rectiformer.text.grammar.drawing import (
    PREDICATE_FRAMES,
    SHORT_FRAMES,
    Dice,
    adverbials_of,
    anaphor,
    draw_action,
    draw_clause,
    draw_noun_phrase,
    draw_object,
    draw_state,
    draw_subject,
    kind_of,
    nouns_of,
    verbs_of,
)
from rectiformer.text.grammar.lexicon import FIRST, FIRST_PLURAL, SECOND

SPLITS = ("train", "valid", "test")
MIN_WORDS, MAX_WORDS = 4, 16  # per side, punctuation included
END = Word("", (-2,))
CONJUNCTION = (-3,)  # the keys of what opens a clause
GOALS = (lexicon.TO, lexicon.INTO)


@dataclass(frozen=True)
class Dependent:
    """A target word that only an earlier sentence of the document decides."""

    target_index: int
    kind: str  # "pronoun" or "term"
    correct: str
    wrong: tuple[str, ...]
    antecedent: int  # index of the deciding sentence in the document


@dataclass(frozen=True)
class Pair:
    """A German sentence, its English translation and the links (source index, target index) between their words."""

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]  # without the sure ones
    dependents: tuple[Dependent, ...] = ()

    @property
    def source(self) -> str:
        """The German text."""
        return plain_text(self.source_words)

    @property
    def target(self) -> str:
        """The English text."""
        return plain_text(self.target_words)


def plain_text(words: Sequence[str]) -> str:
    """The words as one line of text, punctuation attached."""
    return "".join(word if word in ".,?!" else f" {word}" for word in words)[1:]


def split_of(source: str) -> str:
    """The split of a German sentence, for every seed: 1 in 20 is valid, 1 in 20 test."""
    bucket = blake2b(source.encode(), digest_size=8).digest()[0] % 20
    return {0: "valid", 1: "test"}.get(bucket, "train")


def pair_words(german: Words, english: Words, mark: str = ".") -> Pair:
    """Finish a sentence: capitals, final mark, and links between words with a key in common."""
    end = END._replace(text=mark)
    german, english = [*capitalize(german), end], [*capitalize(english), end]
    sure = frozenset(links([word.keys for word in german], [word.keys for word in english]))
    every = links([word.keys + word.maybe for word in german], [word.keys + word.maybe for word in english])
    return Pair(
        tuple(word.text for word in german), tuple(word.text for word in english), sure, frozenset(every) - sure
    )


def links(source: Sequence[tuple[int, ...]], target: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Source and target positions of words that have a key in common."""
    positions: dict[int, list[int]] = {}
    for t, keys in enumerate(target):
        for key in keys:
            positions.setdefault(key, []).append(t)
    return ((s, t) for s, keys in enumerate(source) for key in keys for t in positions.get(key, ()))


def capitalize(words: Words) -> Words:
    """The words with the first letter of the first as a capital."""
    first = words[0].text
    return [words[0]._replace(text=first[0].upper() + first[1:]), *words[1:]]


def fits(pair: Pair, split: str) -> bool:
    """Whether a pair has a usable length and belongs to the split."""
    lengths = len(pair.source_words), len(pair.target_words)
    return min(lengths) >= MIN_WORDS and max(lengths) <= MAX_WORDS and split_of(pair.source) == split


def draw_sentences(count: int, seed: int, split: str = "train") -> Iterator[Pair]:
    """`count` sentence pairs; pair i depends only on seed, split and i. No two splits share a sentence."""
    check_request(count, split)
    return (draw_sentence(Dice(f"sentence {seed} {split} {index}"), split) for index in range(count))


def check_request(count: int, split: str) -> None:
    """Raise an ArgumentError for a negative count or an unknown split."""
    if count < 0:
        raise ArgumentError(f"count = {count} is negative; ask for 0 or more")
    if split not in SPLITS:
        raise ArgumentError(unknown_name("split", split, SPLITS))


def draw_sentence(dice: Dice, split: str) -> Pair:
    """A sentence of any form that belongs to the split."""
    while not fits(pair := dice.pick(FORMS)(dice), split):
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
    return isinstance(phrase, NounPhrase) and phrase.gender == "m" and phrase.determiner is not None


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
    listener = PronounPhrase(dice.key(), SECOND)
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
        if isinstance(second.subject, PronounPhrase) and second.subject.pronoun not in (FIRST, FIRST_PLURAL):
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


def draw_conjunction(dice: Dice, *clauses: Clause) -> tuple[Word, Word]:
    """A conjunction, temporal ones only between clauses that are not in the perfect."""
    perfect = any(clause.mode == "perfect" for clause in clauses)
    german, english = dice.pick(lexicon.REASONS if perfect else lexicon.REASONS + lexicon.OCCASIONS)
    return Word(german, CONJUNCTION), Word(english, CONJUNCTION)


def draw_subordinate_last(dice: Dice) -> Pair:
    """A main clause and a verb-final one. English has no comma there."""
    main = draw_clause(dice, SHORT_FRAMES, short=True)
    second = draw_second(dice, main)
    german, english = draw_conjunction(dice, main, second)
    source = [*main.german(), COMMA, german, *second.german("last")]
    return pair_words(source, [*main.english(), english, *second.english()])


def draw_subordinate_first(dice: Dice) -> Pair:
    """A verb-final clause in front of the main verb."""
    first = draw_clause(dice, SHORT_FRAMES, short=True)
    main = draw_second(dice, first)
    german, english = draw_conjunction(dice, first, main)
    source = [german, *first.german("last"), LINKED_COMMA, *main.german("first")]
    return pair_words(source, [english, *first.english(), LINKED_COMMA, *main.english()])


def draw_reported(dice: Dice) -> Pair:
    """What someone thinks, says or asks."""
    frame = dice.pick(("dass", "dass", "ob"))
    outer = Clause(dice.key(), draw_subject(dice, "person"), dice.pick(verbs_of(frame)))
    return report(outer, draw_clause(dice, SHORT_FRAMES))


def report(outer: Clause, inner: Clause) -> Pair:
    """Join a clause to the verb that reports it."""
    german, english = ("ob", "whether") if outer.verb and outer.verb.frame == "ob" else ("dass", "that")
    source = [*outer.german(), COMMA, Word(german, CONJUNCTION), *inner.german("last")]
    return pair_words(source, [*outer.english(), Word(english, CONJUNCTION), *inner.english()])


def draw_relative(dice: Dice) -> Pair:
    """A statement about someone or something that a relative clause identifies."""
    head = draw_noun_phrase(dice, nouns_of(f"{lexicon.BEINGS} thing text"), adjective=0.2)
    pronoun = RelativePhrase(dice.key(), head)
    kind = head.noun.kind
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
    comma = [LINKED_COMMA] if german == "aber" else []
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
