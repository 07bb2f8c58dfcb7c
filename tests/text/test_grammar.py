"""The built-in corpus: right German, right English, exact links, nothing shared between splits."""

from collections import Counter, defaultdict
from itertools import chain, pairwise

import pytest
from sacrebleu.metrics import BLEU

from rectiformer.errors import ArgumentError
from rectiformer.text.grammar import draw_documents, draw_sentences, lexicon
from rectiformer.text.grammar.clauses import plain_text

SPLITS = ["train", "valid", "test"]


@pytest.fixture(scope="module")
def train():
    return list(draw_sentences(20_000, seed=1))


@pytest.fixture(scope="module")
def held_out():
    return list(draw_sentences(500, seed=1, split="test"))


@pytest.fixture(scope="module")
def documents():
    return list(draw_documents(300, seed=1))


@pytest.mark.parametrize("split", SPLITS)
def test_equal_requests_give_equal_pairs(split):
    assert list(draw_sentences(30, 7, split)) == list(draw_sentences(40, 7, split))[:30]
    assert list(draw_documents(3, 7, split)) == list(draw_documents(4, 7, split))[:3]
    assert list(draw_sentences(30, 7, split)) != list(draw_sentences(30, 8, split))


def test_the_corpus_never_changes():
    """Reported numbers hold only as long as this sentence stays: it is the first of seed 1 on every machine."""
    (pair,) = draw_sentences(1, 1)
    assert pair.source == "Der Bruder glaubt, dass sie zwei schöne Haustüren auf dieser Brücke aufmacht."
    assert pair.target == "The brother thinks that she opens two beautiful house doors on this bridge."


def test_splits_share_no_sentence(train, held_out, documents):
    pools = {"train": train + list(chain(*documents)), "test": list(held_out)}
    pools["valid"] = list(draw_sentences(300, 2, "valid"))
    for split in ("valid", "test"):
        pools[split] += chain(*draw_documents(30, 3, split))
    sources = {split: {pair.source for pair in pairs} for split, pairs in pools.items()}
    assert sources["train"].isdisjoint(sources["test"])
    assert sources["train"].isdisjoint(sources["valid"])
    assert sources["valid"].isdisjoint(sources["test"])


@pytest.mark.parametrize(
    ("count", "split", "message"), [(-1, "train", "count = -1"), (1, "trian", "did you mean 'train'")]
)
@pytest.mark.parametrize("draw", [draw_sentences, draw_documents])
def test_impossible_requests_are_refused_at_once(draw, count, split, message):
    with pytest.raises(ArgumentError, match=message):
        draw(count, 1, split)


def test_a_sentence_has_one_translation(train, held_out):
    translations = defaultdict(set)
    for pair in train + held_out:
        translations[pair.source].add(pair.target)
    assert [source for source, targets in translations.items() if len(targets) > 1] == []


def test_sentences_seldom_repeat(train):
    assert len({pair.source for pair in train}) > 0.98 * len(train)


def test_text_is_the_words_with_punctuation_attached(train):
    for pair in train[:2_000]:
        for text, words in ((pair.source, pair.source_words), (pair.target, pair.target_words)):
            for mark in ".,?!":
                text = text.replace(mark, f" {mark}")
            assert tuple(text.split(" ")) == words
            assert 4 <= len(words) <= 16
            assert words[0][0].isupper()


def test_links_point_at_words_and_punctuation_at_punctuation(train, documents):
    for pair in chain(train[:5_000], *documents):
        assert pair.sure.isdisjoint(pair.possible)
        for s, t in pair.sure | pair.possible:
            assert s in range(len(pair.source_words))
            assert t in range(len(pair.target_words))
        marks = {t for t, word in enumerate(pair.target_words) if word in ".,?!"}
        linked = {t: pair.source_words[s] for s, t in pair.sure if t in marks or pair.source_words[s] in ".,?!"}
        assert linked == {t: pair.target_words[t] for t in marks}


def test_only_words_without_counterpart_stay_unlinked(train):
    source, target = Counter(), Counter()
    for pair in train:
        links = pair.sure | pair.possible
        source.update({pair.source_words[s] for s in set(range(len(pair.source_words))) - {s for s, _ in links}})
        target.update({pair.target_words[t] for t in set(range(len(pair.target_words))) - {t for _, t in links}})
    assert set(source) == {",", "ja", "doch", "eben", "mal", "denn", "sich", "mich", "uns"}
    assert set(target) == {"do", "does", "Do", "Does"}


# What may stand before a noun of each gender: determiner and ending of the adjective after it, written out by hand.
BEFORE = {
    "m": "der+e den+en dem+en ein+er einen+en einem+en dieser+e diesen+en diesem+en im+en am+en zum+en vom+en",
    "f": "die+e der+en eine+e einer+en diese+e dieser+en zur+en",
    "n": "das+e dem+en ein+es einem+en dieses+e diesem+en im+en ins+e zum+en vom+en am+en",
}
SINGULAR = {
    "m": "Mann Hund Vogel Tisch Ball Korb Apfel Brief Bruder Bahnhof Garten Fluss",
    "f": "Frau Schwester Katze Kuh Lampe Tür Haustür Blume Tasse Zeitung Schule Küche",
    "n": "Pferd Bild Kleid Radio Fahrrad Ei Buch Schulbuch Haus Dorf Gartentor",
}


def test_german_articles_and_adjectives_agree_with_their_nouns(train):
    genders = {word: gender for gender, words in SINGULAR.items() for word in words.split()}
    stems = {row.stem for row in lexicon.ADJECTIVES}
    checked = 0
    for pair in train:
        words = [word.lower() if i == 0 else word for i, word in enumerate(pair.source_words)]
        for i, word in enumerate(words):
            gender = genders.get(word)
            if gender is None:
                continue
            ending = next((words[i - 1].removeprefix(stem) for stem in stems if words[i - 1].startswith(stem)), None)
            determiner = words[i - 1] if ending is None else words[i - 2]
            for own, like in (("mein", "ein"), ("unser", "ein"), ("kein", "ein")):
                determiner = like + determiner.removeprefix(own) if determiner.startswith(own) else determiner
            allowed = [entry.split("+") for entry in BEFORE[gender].split()]
            assert [determiner, ending] in allowed or (ending is None and determiner in dict(allowed)), pair.source
            checked += 1
    assert checked > 10_000


def test_english_verbs_and_articles_agree(train):
    wrong = {"he": "have do are am", "she": "have do are am", "it": "have do are am", "I": "has does is are"}
    wrong |= dict.fromkeys(["we", "they"], "has does is am")
    for pair in (pair for pair in train if pair.target_words[-1] != "?"):
        words = [word if word == "I" else word.lower() for word in pair.target_words]
        for word, following in pairwise(words):
            assert following not in wrong.get(word, "").split(), pair.target
            if word in ("a", "an"):
                assert (word == "an") == (following[0] in "aeiou"), pair.target


def test_vocabulary_is_small_and_covered_by_few_pairs(train, held_out, documents):
    for side in ("source_words", "target_words"):
        words = [{word for pair in pairs for word in getattr(pair, side)} for pairs in (train, train[:5_000], held_out)]
        everything = words[0] | {word for pair in chain(*documents) for word in getattr(pair, side)}
        assert 150 <= len(everything) <= 600
        assert words[2] <= words[1]


def dictionary_of(pairs):
    """The most frequent translation of each German word: what its sure links point at, in order."""
    translations = defaultdict(Counter)
    for pair in pairs:
        targets = defaultdict(list)
        for s, t in sorted(pair.sure):
            targets[s].append(pair.target_words[t].lower())
        for s, word in enumerate(pair.source_words):
            translations[word.lower()][tuple(targets[s])] += 1
    return {word: counts.most_common(1)[0][0] for word, counts in translations.items()}


def word_for_word(pair, dictionary):
    return [word for source in pair.source_words for word in dictionary[source.lower()]]


def usual_positions(pairs):
    positions = defaultdict(list)
    for pair in pairs:
        for t, word in enumerate(pair.target_words):
            positions[word.lower()].append(t / len(pair.target_words))
    return {word: sum(values) / len(values) for word, values in positions.items()}


def bleu(hypotheses, pairs):
    texts = [plain_text(words).capitalize() for words in hypotheses]
    return BLEU(lowercase=True).corpus_score(texts, [[pair.target for pair in pairs]]).score


def test_neither_a_dictionary_nor_a_bag_of_words_translates(train, held_out):
    dictionary, positions = dictionary_of(train), usual_positions(train)
    words = [word_for_word(pair, dictionary) for pair in held_out]
    assert 10 < bleu(words, held_out) < 40  # the dictionary does know words
    assert bleu([sorted(bag, key=positions.__getitem__) for bag in words], held_out) < 40
    assert bleu([pair.target_words for pair in held_out], held_out) == pytest.approx(100)


PERSONS = {"er": "he him", "sie": "she her", "es": "she her", "ihn": "he him"}


def test_documents_note_what_depends_on_earlier_sentences(documents):
    for document in documents:
        assert 4 <= len(document) <= 12
        assert len({pair.source for pair in document}) == len(document)
        for index, pair in enumerate(document):
            for dependent in pair.dependents:
                assert pair.target_words[dependent.target_index] == dependent.correct
                assert dependent.antecedent < index
                assert dependent.wrong
                assert dependent.correct not in dependent.wrong
                (source,) = (pair.source_words[s] for s, t in pair.sure if t == dependent.target_index)
                assert (source.lower() in PERSONS) == (dependent.kind == "pronoun")
        assert any(pair.dependents for pair in document)


def test_pronouns_follow_the_noun_that_introduced_them(documents):
    persons = {row.german for row in lexicon.NOUNS if row.kind == "person"} | {"Jungen", "Nachbarn"}
    seen = Counter()
    for document in documents:
        for pair in document:
            for dependent in (row for row in pair.dependents if row.kind == "pronoun"):
                person = not persons.isdisjoint(document[dependent.antecedent].source_words)
                assert (dependent.correct.lower() != "it") == person, (document[dependent.antecedent].source, pair)
                seen[dependent.correct.lower()] += 1
    assert set(seen) == {"he", "him", "she", "her", "it"}


def test_only_the_document_tells_how_some_sentences_translate():
    translations = defaultdict(set)
    for document in draw_documents(1_000, seed=4):
        for pair in document:
            if pair.dependents:
                translations[pair.source].add(pair.target)
    assert sum(len(targets) > 1 for targets in translations.values()) > 100


@pytest.mark.parametrize("split", SPLITS)
def test_every_sense_of_every_term_is_in_every_split(split):
    senses = {row.english for row, _ in lexicon.TERMS}
    documents = draw_documents(120, 5, split)
    found = {row.correct for pair in chain(*documents) for row in pair.dependents if row.kind == "term"}
    assert found == senses


def test_single_sentences_have_no_terms_and_no_dependents(train):
    terms = {row.german for row, _ in lexicon.TERMS}
    assert all(terms.isdisjoint(pair.source_words) and not pair.dependents for pair in train)
