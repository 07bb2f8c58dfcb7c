"""Documents of the grammar: topics are introduced, then mentioned by a pronoun or term that only context decides."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from rectiformer.text.grammar import lexicon, sentences
from rectiformer.text.grammar.clauses import Clause, Dependent, Pair, Phrase, PronounPhrase, fits, pair_words
from rectiformer.text.grammar.sentences import Dice

INTRODUCED = "person animal thing opening device vehicle text"  # kinds a document may be about
NO_NOUN_FRAMES = ("none", "none", "reflexive")


def draw_documents(count: int, seed: int, split: str = "train") -> Iterator[tuple[Pair, ...]]:
    """`count` documents of 4 to 12 sentence pairs, with the words that depend on earlier sentences in `dependents`.

    Document i depends only on seed, split and i. Its sentences are split like those of `draw_sentences`.
    """
    sentences.check_request(count, split)
    return (draw_document(Dice(f"document {seed} {split} {index}"), split) for index in range(count))


@dataclass(frozen=True)
class Topic:
    """What a document is about. Topics of a document differ in gender, so a pronoun is unambiguous."""

    noun: lexicon.Noun
    pronoun: lexicon.Pronoun
    sort: lexicon.Noun | None = None  # says which sense a term has
    rival: str = ""  # the term's other sense
    sentence: int = 0  # where it was introduced


def draw_document(dice: Dice, split: str) -> tuple[Pair, ...]:
    """A document: topics are introduced and then mentioned, with unrelated sentences in between."""
    waiting = draw_topics(dice)
    known: list[Topic] = []
    pairs: list[Pair] = []
    length = dice.pick(range(4, 13))
    while len(pairs) < length:
        if not known or (waiting and len(pairs) > 1 and dice.chance(0.3)):
            known.append(replace(waiting.pop(), sentence=len(pairs)))
            draw = partial(draw_meeting if known[-1].sort is None else draw_definition, dice, known[-1])
        elif len(pairs) == 1 or dice.chance(0.7):
            draw = partial(draw_mention, dice, dice.pick(known))
        else:
            draw = partial(draw_aside, dice)
        said = [pair.source for pair in pairs]
        while not fits(pair := draw(), split) or pair.source in said:
            pass
        pairs.append(pair)
    return tuple(pairs)


def draw_topics(dice: Dice) -> list[Topic]:
    """One to three topics of different genders, one of them often a term of two senses."""
    topics: list[Topic] = []
    for _ in range(dice.pick((1, 2, 3))):
        topic = draw_term(dice) if dice.chance(0.4) else draw_plain_topic(dice)
        if topic.noun.gender not in [other.noun.gender for other in topics]:
            topics.append(topic)
    return topics


def draw_plain_topic(dice: Dice) -> Topic:
    """A person or thing that a pronoun will refer to; a person half of the time."""
    noun = dice.pick(sentences.nouns_of("person" if dice.chance(0.5) else INTRODUCED))
    return Topic(noun, lexicon.personal_pronoun(noun))


def draw_term(dice: Dice) -> Topic:
    """One sense of a term."""
    noun, sort = dice.pick(lexicon.TERMS)
    (rival,) = (other.english for other, _ in lexicon.TERMS if other.german == noun.german and other != noun)
    return Topic(noun, lexicon.IT[noun.gender], sort, rival)


def draw_meeting(dice: Dice, topic: Topic) -> Pair:
    """The first sentence about a topic: the speaker sees, buys or calls it."""
    direct = sentences.draw_noun_phrase(dice, [topic.noun], (lexicon.A, lexicon.THE, lexicon.THIS))
    clause = sentences.draw_action(
        dice, "acc", draw_speaker(dice), direct=direct, direct_kind=topic.noun.kind, short=True, negatable=False
    )
    return pair_words(clause.german(), clause.english())


def draw_definition(dice: Dice, topic: Topic) -> Pair:
    """The first sentence about a term: what sort of thing it is, stated or reported."""
    assert topic.sort is not None
    subject = sentences.draw_noun_phrase(dice, [topic.noun], sentences.DEFINITE, 0.0)
    clause = Clause(dice.key(), subject, direct=sentences.draw_noun_phrase(dice, [topic.sort], (lexicon.A,), 0.8))
    if dice.chance(0.5):
        return sentences.report(Clause(dice.key(), draw_speaker(dice), dice.pick(sentences.verbs_of("dass"))), clause)
    clause = replace(clause, particle=dice.pick(("", *lexicon.STATEMENT_PARTICLES)))
    return pair_words(clause.german(), clause.english())


def draw_mention(dice: Dice, topic: Topic) -> Pair:
    """A later sentence about a topic, by pronoun or, for a term, often by name."""
    named, acts = topic.sort is not None and dice.chance(0.6), dice.chance(0.6)
    phrase: Phrase = PronounPhrase(dice.key(), topic.pronoun)
    if named:
        phrase = sentences.draw_noun_phrase(dice, [topic.noun], sentences.DEFINITE, 0.3)
    clause = draw_about(dice, phrase, topic.noun.kind, acts)
    pair = pair_words(clause.german(), clause.english())
    return replace(pair, dependents=(find_dependent(pair, topic, named, acts),))


def draw_about(dice: Dice, phrase: Phrase, kind: str, acts: bool) -> Clause:
    """A clause in which `phrase` is the only third person: as subject if it `acts`, else as object."""
    if not acts:
        return sentences.draw_action(dice, "acc", draw_speaker(dice), direct=phrase, direct_kind=kind, short=True)
    if dice.chance(0.4):
        return sentences.draw_state(dice, phrase, kind)
    if kind in lexicon.BEINGS.split():
        return sentences.draw_action(dice, dice.pick(NO_NOUN_FRAMES), phrase, kind, short=True)
    return sentences.draw_passive(dice, phrase, kind, agent=False)


def draw_aside(dice: Dice) -> Pair:
    """A sentence of the speaker that mentions nothing a pronoun could refer to."""
    clause = sentences.draw_action(dice, dice.pick(NO_NOUN_FRAMES), draw_speaker(dice), short=True)
    return pair_words(clause.german(), clause.english())


def draw_speaker(dice: Dice) -> PronounPhrase:
    """I or we."""
    return PronounPhrase(dice.key(), dice.pick(sentences.SPEAKERS))


def find_dependent(pair: Pair, topic: Topic, named: bool, acts: bool) -> Dependent:
    """Where the English sentence mentions the topic, and what a translator without context might write there."""
    if named:
        correct, wrong = topic.noun.english, [topic.rival]
    else:
        same_german = (lexicon.PERSON[topic.noun.gender], lexicon.IT[topic.noun.gender])
        readings = [pronoun.subject if acts else pronoun.object for pronoun in same_german]
        correct = topic.pronoun.subject if acts else topic.pronoun.object
        wrong = [reading for reading in readings if reading != correct]
    index = [word.lower() for word in pair.target_words].index(correct)
    word = pair.target_words[index]
    if word != correct:
        wrong = [reading.capitalize() for reading in wrong]
    return Dependent(index, "term" if named else "pronoun", word, tuple(wrong), topic.sentence)
