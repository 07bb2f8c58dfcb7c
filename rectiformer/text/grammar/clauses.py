"""Phrases, clauses and sentence pairs, in German and English at once: word order, tense, negation, agreement, links.

Every word carries keys; words of the two languages that share a key translate each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from rectiformer.text.grammar import lexicon


class Word(NamedTuple):
    """A word, the keys of its sure links, and the keys of its possible ones."""

    text: str
    keys: tuple[int, ...] = ()
    maybe: tuple[int, ...] = ()


Words = list[Word]
COMMA = Word(",")
LINKED_COMMA = Word(",", (-1,))
END = Word("", (-2,))

SPLITS = ("train", "valid", "test")
MIN_WORDS, MAX_WORDS = 4, 16  # per side, punctuation included

# Keys inside a noun phrase, counted from its own.
ADJECTIVE, NOUN = 1, 2


@dataclass(frozen=True)
class NounPhrase:
    """A noun with its determiner, adjective and relative clause; a name has no determiner."""

    key: int
    noun: lexicon.Noun
    determiner: lexicon.Determiner | None = None
    plural: bool = False
    adjective: lexicon.Adjective | None = None
    relative: tuple[Sequence[Word], Sequence[Word]] = ((), ())  # a clause about it, in both languages

    reflexive = "sich"

    @property
    def number(self) -> int:
        """The verb form that agrees: that of er or that of wir."""
        return 2 if self.plural else 1

    @property
    def gender(self) -> str:
        """The gender that endings show: "p" in the plural."""
        return "p" if self.plural else self.noun.gender

    def german(self, case: str) -> Words:
        words = [Word(lexicon.noun_form(self.noun, case, self.plural), (self.key + NOUN,))]
        if self.determiner is None:
            return words
        if self.adjective is not None:
            form = lexicon.adjective_form(self.adjective, self.determiner.kind, case, self.gender)
            words.insert(0, Word(form, (self.key + ADJECTIVE,)))
        words.insert(0, Word(lexicon.determiner_form(self.determiner, case, self.gender), (self.key,)))
        return [*words, COMMA, *self.relative[0], COMMA] if self.relative[0] else words

    def english(self, subject: bool = False) -> Words:
        nouns = (self.noun.english_plural if self.plural else self.noun.english).split()
        words = [Word(noun, (self.key + NOUN,)) for noun in nouns]
        if self.determiner is None:
            return words
        if self.adjective is not None:
            words.insert(0, Word(self.adjective.english, (self.key + ADJECTIVE,)))
        article = self.determiner.english_plural if self.plural else self.determiner.english
        if article == "a":
            article = "an" if words[0].text[0] in "aeiou" else "a"
        return [Word(article, (self.key,)), *words, *self.relative[1]]


@dataclass(frozen=True)
class PronounPhrase:
    """A personal pronoun in a sentence."""

    key: int
    pronoun: lexicon.Pronoun

    @property
    def number(self) -> int:
        return self.pronoun.number

    @property
    def reflexive(self) -> str:
        return self.pronoun.reflexive

    def german(self, case: str) -> Words:
        return [Word(getattr(self.pronoun, case), (self.key,))]

    def english(self, subject: bool = False) -> Words:
        return [Word(self.pronoun.subject if subject else self.pronoun.object, (self.key,))]


Phrase = NounPhrase | PronounPhrase


@dataclass(frozen=True)
class Location:
    """A preposition with a noun phrase; "in dem" is written "im"."""

    key: int
    preposition: lexicon.Preposition
    phrase: NounPhrase

    def german(self) -> Words:
        first, *rest = self.phrase.german(self.preposition.case)
        merged = lexicon.MERGED.get((self.preposition.german, first.text))
        if merged is not None:
            return [Word(merged, (self.key,), first.keys), *rest]
        return [Word(self.preposition.german, (self.key,)), first, *rest]

    def english(self) -> Words:
        return [Word(text, (self.key,)) for text in self.preposition.english.split()] + self.phrase.english()


# Keys inside a clause, counted from its own, which is that of the auxiliary. ADVERBIAL leaves space for three words.
VERB, PREFIX, NEGATION, ADVERBIAL, PREDICATE, PLEASE = 1, 2, 3, 4, 7, 8


@dataclass(frozen=True)
class Clause:
    """Who does what. Without a verb the clause says what the subject is."""

    key: int
    subject: Phrase
    verb: lexicon.Verb | None = None
    mode: str = "present"  # present, perfect, modal, passive, imperative
    modal: lexicon.Modal | None = None
    direct: Phrase | None = None
    indirect: Phrase | None = None
    adverbial: lexicon.Adverbial | None = None
    location: Location | None = None
    predicate: lexicon.Adjective | None = None
    negated: bool = False
    particle: str = ""

    def german(self, order: str = "second", front: str = "subject") -> Words:
        """The German words, with the finite verb "first", "second" after the constituent `front`, or "last"."""
        finite, tail = self._german_verbs()
        constituents = list(self._constituents())
        if order == "last":
            middle = [word for _, words in constituents for word in words]
            if self.verb is None or self.mode != "present":
                return [*middle, *tail, finite]
            return [*middle, self._word(self.verb.prefix + finite.text)]
        fronted = [word for role, words in constituents if order == "second" and role == front for word in words]
        middle = [word for role, words in constituents if order == "first" or role != front for word in words]
        return [*fronted, finite, *middle, *tail]

    def english(self, inverted: bool = False, early: bool = False, past: bool = False) -> Words:
        """The English words: a question if `inverted`, the time first if `early`.

        Args:
            past: translate a German perfect as a simple past, as an adverbial of past time does.
        """
        auxiliary, main, particle = self._english_verbs(inverted, past or bool(self.adverbial and self.adverbial.past))
        subject = [] if self.mode == "imperative" else self.subject.english(subject=True)
        time, role = self._english_adverbial()
        words = time if early else []
        if self.particle == "bitte":
            words = [Word("please", (self.key + PLEASE,))]
        words = [*words, *auxiliary, *subject] if inverted else [*words, *subject, *auxiliary]
        if self.negated:
            words.append(Word("not", (self.key + NEGATION,)))
            if words[-2].text == "can":
                words[-2:] = [Word("cannot", (self.key, self.key + NEGATION))]
        words += time if role == "frequency" else []
        words += [*main, *self._english_objects(particle)]
        if self.predicate is not None:
            words.append(Word(self.predicate.english, (self.key + PREDICATE,)))
        if self.location is not None:
            words += self.location.english()
        return words if early or role == "frequency" else words + time

    def _word(self, text: str) -> Word:
        return Word(text, (self.key + VERB, self.key + PREFIX))

    def _german_verbs(self) -> tuple[Word, Words]:
        """The finite verb, and the words at the end of a main clause."""
        verb, number, finite = self.verb, self.subject.number, (self.key,)
        if verb is None:
            return Word(lexicon.AUXILIARIES["sein"][number], (self.key + VERB,)), []
        if self.mode in ("perfect", "passive"):
            auxiliary = verb.auxiliary if self.mode == "perfect" else "werden"
            return Word(lexicon.AUXILIARIES[auxiliary][number], finite), [self._word(verb.participle)]
        if self.modal is not None:
            return Word(self.modal.forms[number], finite), [self._word(verb.prefix + verb.german)]
        form = lexicon.imperative_form(verb) if self.mode == "imperative" else lexicon.present_form(verb, number)
        if not verb.prefix:
            return self._word(form), []
        return Word(form, (self.key + VERB,)), [Word(verb.prefix, (self.key + PREFIX,))]

    def _constituents(self) -> Iterator[tuple[str, Words]]:
        """The constituents around the verb, in German order: pronouns, times, nouns, locations."""
        objects = [("indirect", self.indirect, "dat"), ("direct", self.direct, "acc" if self.verb else "nom")]
        if self.mode != "imperative":
            yield "subject", self.subject.german("nom")
        if self.verb is not None and self.verb.frame == "reflexive":
            yield "reflexive", [Word(self.subject.reflexive)]
        for role, phrase, case in objects:
            if isinstance(phrase, PronounPhrase):
                yield role, phrase.german(case)
        if self.particle:
            yield "particle", [Word(self.particle, (self.key + PLEASE,))]
        if self.adverbial is not None:
            texts = self.adverbial.german.split()
            yield "adverbial", [Word(text, (self.key + ADVERBIAL + i,)) for i, text in enumerate(texts)]
        for role, phrase, case in objects:
            if isinstance(phrase, NounPhrase):
                yield role, phrase.german(case)
        if self.negated:
            yield "negation", [Word("nicht", (self.key + NEGATION,))]
        if self.location is not None:
            yield "location", self.location.german()
        if self.predicate is not None:
            yield "predicate", [Word(self.predicate.german, (self.key + PREDICATE,))]

    def _english_verbs(self, inverted: bool, past: bool) -> tuple[Words, Words, Words]:
        """The first auxiliary, the other verbs, and the particle of the main one."""
        verb, number, k = self.verb, self.subject.number, self.key
        if verb is None:
            return [Word(lexicon.BE[number], (k + VERB,))], [], []
        base, _, particle = verb.english.partition(" ")
        form, maybe = base, () if particle or not verb.prefix else (k + PREFIX,)
        auxiliary: Words = []
        lead: Words = []
        supported = inverted or self.negated
        if self.mode == "perfect" and past:
            auxiliary = [Word("did", (), (k,))] if supported else []
            form, maybe = (base, maybe) if supported else (verb.past, (*maybe, k))
        elif self.mode in ("perfect", "passive"):
            auxiliary = [Word((lexicon.HAVE if self.mode == "perfect" else lexicon.BE)[number], (k,))]
            form = verb.english_participle
        elif self.modal is not None:
            auxiliary, lead = self._english_modal(self.modal.english.split(), supported)
        elif self.mode == "imperative":
            auxiliary = [Word("do")] if self.negated else []
        elif supported:
            auxiliary = [Word(lexicon.DO[number])]
        elif number == 1:
            form = lexicon.third_person(base)
        return auxiliary, [*lead, Word(form, (k + VERB,), maybe)], [Word(particle, (k + PREFIX,))] if particle else []

    def _english_modal(self, texts: list[str], supported: bool) -> tuple[Words, Words]:
        """The words of a modal verb, the first apart: can | would, like to | does, want to."""
        words = [Word(text, (), (self.key,)) if text == "to" else Word(text, (self.key,)) for text in texts]
        if texts[0] != "want":
            return words[:1], words[1:]
        number = self.subject.number
        if supported:
            return [Word(lexicon.DO[number])], words
        return [], [Word(lexicon.third_person("want") if number == 1 else "want", (self.key,)), *words[1:]]

    def _english_adverbial(self) -> tuple[Words, str]:
        if self.adverbial is None:
            return [], ""
        first, words = self.key + ADVERBIAL, []
        for text, i in zip(self.adverbial.english.split(), self.adverbial.order, strict=True):
            # On Monday, in the morning: "am" does not say which, its noun does, so a link to that is possible too.
            noun = (first + 1,) if text in ("on", "in", "the") else ()
            words.append(Word(text, (), (first + i, *noun)) if text == "the" else Word(text, (first + i,), noun))
        return words, self.adverbial.role

    def _english_objects(self, particle: Words) -> Words:
        """The objects with the verb's particle: picks him up, picks up the boy."""
        direct = self.direct.english() if self.direct is not None else []
        words = direct + particle if isinstance(self.direct, PronounPhrase) else particle + direct
        if self.indirect is None:
            return words
        to = [Word("to", (), self.indirect.german("dat")[0].keys)] if self.direct is not None else []
        return words + to + self.indirect.english()


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
