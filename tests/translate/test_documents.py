"""Documents in, documents out: a translation for every sentence, whatever the model writes and however it is cut."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.config import Config, DataConfig, ModelConfig, TrainingConfig, ValidationConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, ConfigError
from rectiformer.measure.agreement import count_agreement
from rectiformer.measure.bleu import by_level, score
from rectiformer.model.transformer import Transformer
from rectiformer.text.documents import split_ids
from rectiformer.text.grammar import draw_documents
from rectiformer.text.prepared import prepare
from rectiformer.text.vocabulary import SEPARATOR, Vocabulary
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.train.validation import Validator
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.evaluate import evaluate_agreement
from rectiformer.translate.options import Hypothesis, SearchOptions
from rectiformer.translate.translator import Translator

SMALL = ModelConfig(
    hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=16, dropout=0.5, tie_embeddings="none"
)
WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]
QUICK = SearchOptions(beam=2, extra_length=3)
LIMIT = 30
HOSTILE = [
    "",
    " \t",
    SEPARATOR,
    f"das {SEPARATOR} Haus{SEPARATOR}",
    "<d>",
    "\u2028",
    "\0",
    "\ud800 Haus",
    "日本語 😀",
    "das Haus " * 30,
]


def draw_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) + draw.choice([".", "!", ""]) for _ in range(count)]


def draw_groups(seed=1):
    """Documents of 0 to 9 sentences, hostile ones among them."""
    draw = random.Random(seed)
    lines = draw_lines(60, seed) + HOSTILE
    return [draw.choices(lines, k=size) for size in (5, 0, 1, 9, 2, 0, 7, 3)] + [
        HOSTILE,
        ["das " * 40],
        [""],
        [SEPARATOR],
    ]


@pytest.fixture(scope="module")
def words():
    return Vocabulary.train(draw_lines(200), VocabularyConfig(size=60, byte_fallback=False), separator=True)


def build(words, segment=LIMIT, translator=Translator, max_length=40):
    torch.manual_seed(0)
    model = Transformer(SMALL, words.size, words.size, bos=words.bos).double()
    with torch.no_grad():
        model.output.mul_(4)  # sure of something
        model.output[words.eos].mul_(2)  # and ending now and then
    return translator(model, words, words, max_length=max_length, segment_length=segment)


def always(translator, token):
    """Make `token` the likeliest of all, whatever the source."""
    norm = translator.model.decoder[-1].around_memory.norm
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        translator.model.output[token] = 10.0
    return translator


class Copying(Translator):
    """Writes what it reads, of segments of up to `reliable` sentences; of longer ones without any separator."""

    reliable = 99

    def search_all(self, parts, *others, **how):
        self.read = [*getattr(self, "read", []), *([part.ids for part in parts])]
        return [[Hypothesis(self.copy(part.ids), 0.0, 0.0, [0.0] * len(part.ids), True)] for part in parts]

    def copy(self, ids):
        sentences = len(split_ids(ids, self.source.separator))
        return [id for id in ids if id != self.source.separator] if sentences > self.reliable else list(ids)


def translate(translator, groups, options=QUICK, **how):
    return list(translate_documents(translator, iter(groups), options, **{"warn": lambda _: None, **how}))


def readable(words, text):
    return words.decode(words.encode(text))


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("habit", ["random", "never separates", "only separates", "never ends"])
def test_as_many_sentences_come_out_as_go_in(words, habit, overlap):
    translator = build(words)
    if habit == "only separates":
        always(translator, words.separator)
    elif habit == "never ends":
        always(translator, words.encode("Haus")[0])
    else:
        with torch.no_grad():
            translator.model.output[words.separator].mul_(-100 if habit == "never separates" else 1)
    groups = draw_groups()
    found = translate(translator, groups, overlap=overlap)
    assert [each.sources for each in found] == groups
    assert [len(each.sentences) for each in found] == [len(group) for group in groups]
    assert [each.number for each in found] == list(range(1, len(groups) + 1))
    for each in found:
        assert all(text == "" for text, source in zip(each.sentences, each.sources, strict=True) if not source.strip())
        assert not any("\n" in text for text in each.sentences)
    if habit == "never ends":
        several = [each for each in found if each.segments < sum(bool(line.strip()) for line in each.sources)]
        assert several
        assert all(each.fallbacks for each in several)


@pytest.mark.parametrize(
    "how", [{"batch_sentences": 1}, {"batch_tokens": 1}, {"batch_tokens": 90}, {"buffer": 1}], ids=str
)
def test_batches_and_buffers_change_nothing(words, how):
    translator = build(words)
    assert translate(translator, draw_groups(), **how) == translate(translator, draw_groups())


def test_samples_do_not_depend_on_buffers(words):
    options = SearchOptions(sample=True, extra_length=3, seed=5)
    translator = build(words)
    first = translate(translator, draw_groups(), options)
    assert translate(translator, draw_groups(), options, buffer=1, batch_sentences=1) == first
    assert translate(translator, draw_groups(), replace(options, seed=6)) != first


@given(st.lists(st.lists(st.sampled_from(draw_lines(30, 3) + HOSTILE), max_size=9), max_size=5), st.integers(0, 4))
def test_a_model_that_copies_gives_the_document_back_however_it_is_cut(groups, overlap):
    words = COPIER.source
    for limit in (None, 1, 12, 500):
        found = translate(COPIER, groups, limit=limit, overlap=overlap)
        expected = [[readable(words, line) if line.strip() else "" for line in group] for group in groups]
        assert [each.sentences for each in found] == expected
        assert not any(each.fallbacks for each in found)


COPIER = build(
    Vocabulary.train(draw_lines(200), VocabularyConfig(size=60), separator=True), translator=Copying, max_length=10**6
)


def test_a_following_segment_begins_with_what_came_before_and_drops_it(words):
    translator = build(words, translator=Copying)
    lines = [f"{word} Haus" for word in WORDS]
    (found,) = translate(translator, [lines], limit=20, overlap=2)
    texts = [[words.decode(part) for part in split_ids(ids, words.separator)] for ids in translator.read]
    assert len(texts) == found.segments > 2
    for before, after in pairwise(texts):
        assert after[:2] == before[-2:]
    assert found.sentences == lines


def test_a_segment_that_comes_back_wrong_is_halved_and_that_is_said(words):
    translator = build(words, translator=Copying)
    translator.reliable = 2
    said = []
    lines = draw_lines(8, seed=4)
    (found,) = translate(translator, [lines], limit=500, warn=said.append)
    sizes = [len(split_ids(ids, words.separator)) for ids in translator.read]
    assert sizes == [8, 4, 4, 2, 2, 2, 2]
    assert found.sentences == lines
    assert (found.segments, found.fallbacks) == (1, 1)
    note = "1 of 1 segments did not come back sentence by sentence, and were translated in smaller ones"
    assert found.warnings == [note]
    assert said == [f"document 1: {note}"]


def test_context_is_given_up_before_a_sentence_is(words):
    translator = build(words, translator=Copying)
    translator.reliable = 1
    lines = draw_lines(5, seed=4)
    (found,) = translate(translator, [lines], limit=12, overlap=1)
    assert found.sentences == lines


def test_translations_may_be_longer_by_as_much_a_sentence_as_a_sentence_may(words):
    """A document is no reason to stop earlier than its sentences would, one by one."""
    translator = build(words)
    allowed = []
    search_all = translator.search_all
    translator.search_all = lambda parts, options, **how: (
        allowed.extend((len(part.ids), options.extra_length) for part in parts) or search_all(parts, options, **how)
    )
    lines = ["das Haus", "der Hund", "zwei Katzen"]
    translate(translator, [lines, lines[:1]], limit=500)
    joined = sum(len(words.encode(line)) + 1 for line in lines) - 1
    assert (joined, 4 * QUICK.extra_length) in allowed
    assert (len(words.encode(lines[0])), QUICK.extra_length) in allowed


def test_a_sentence_longer_than_the_model_takes_is_split_not_cut(words):
    translator = build(words, translator=Copying, max_length=20)
    line = "das kleine Haus steht am alten Fluss. " * 8
    (found,) = translate(translator, [["der Hund", line.strip(), "zwei"]])
    assert found.sentences == ["der Hund", line.strip(), "zwei"]
    (note,) = found.warnings
    assert note.startswith("sentence 2: ")
    assert "translated in" in note


def test_segments_are_no_longer_than_what_goes_through_the_model_at_once(words):
    translator = build(words, translator=Copying, max_length=LIMIT // 2)
    lines = draw_lines(9, seed=2)
    assert [each.sentences for each in translate(translator, [lines])] == [lines]
    assert LIMIT // 4 < max(map(len, translator.read)) <= LIMIT // 2


def test_a_model_of_sentences_translates_each_by_itself(words):
    plain = Vocabulary.train(draw_lines(200), VocabularyConfig(size=60))
    translator = build(plain, segment=0)
    lines = draw_lines(9, seed=2)
    (found,) = translate(translator, [lines])
    assert found.sentences == [each.text for each in translator.translate(lines, QUICK, warn=lambda _: None)]
    assert (found.segments, found.fallbacks) == (9, 0)
    with pytest.raises(ArgumentError, match=r"segments of 50 subwords, but this model knows single sentences only"):
        translate(translator, [lines], limit=50)


@pytest.mark.parametrize(
    ("how", "words_"),
    [
        ({"overlap": -1}, "overlap = -1"),
        ({"limit": 0}, "limit = 0"),
        ({"options": SearchOptions(nbest=2)}, "nbest = 2"),
    ],
)
def test_what_makes_no_sense_is_refused(words, how, words_):
    with pytest.raises(ArgumentError, match=words_):
        translate(build(words), [["das"]], **how)


def test_documents_are_read_as_they_are_needed(words):
    read = []

    def documents():
        for number in range(50):
            read.append(number)
            yield draw_lines(4, number)

    found = translate_documents(build(words, translator=Copying), documents(), QUICK, buffer=8)
    next(found)
    assert len(read) == 2


def test_document_scores_are_sacrebleu_on_joined_lines():
    documents = list(draw_documents(20, 1, "test"))
    references = [[pair.target for pair in document] for document in documents]
    hypotheses = [[text.replace("the", "a") for text in group] for group in references]
    ours, right = by_level([*hypotheses, []]), by_level([*references, []])
    joined = [" ".join(group) for group in hypotheses], [[" ".join(group) for group in references]]
    found = score(ours["d-"], right["d-"], ("bleu",))["bleu"]
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(*joined).score)
    assert len(ours["d-"]) == 20
    assert ours["s-"] == [text for group in hypotheses for text in group]


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    data = DataConfig(grammar="documents", sentences=100, valid_sentences=40, segment_length=64)
    return prepare(Config(data=data, vocabulary=VocabularyConfig(size=300)), tmp_path_factory.mktemp("valid") / "data")


def test_validation_scores_segments_as_lines(segmented):
    """A model that copied the reference would have 100: here it is decoding that gives the reference."""
    words = segmented.target
    config = Config(training=TrainingConfig(batch_tokens=300), validation=ValidationConfig(sentences=20))
    model = Transformer(SMALL, words.size, words.size, bos=words.bos)
    validator = Validator(model, segmented, config, lambda: None)
    hypotheses, references = validator.translate()
    assert len(hypotheses) == len(references) < segmented.valid.pairs
    assert 20 <= sum(len(sources) for sources, _ in segmented.valid_segments[: len(references)]) < 20 + 12
    assert references == [" ".join(targets) for _, targets in segmented.valid_segments[: len(references)]]
    found = validator.validate()
    assert found.bleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)


def test_data_prepared_with_other_segments_is_refused(segmented, tmp_path):
    with pytest.raises(ConfigError, match=r"prepared with data\.segment_length = 64, but here it is 0"):
        train(load_config(None), tmp_path / "run", data=segmented.folder)


def test_agreement_is_counted_on_documents_of_the_grammar(segmented):
    model = Transformer(SMALL, segmented.source.size, segmented.target.size, bos=segmented.target.bos)
    translator = Translator(model, segmented.source, segmented.target, segment_length=64)
    found = evaluate_agreement(translator, 3, SearchOptions(beam=1, extra_length=2), warn=lambda _: None)
    documents = list(draw_documents(3, 1, "test"))
    assert found.counts["all"].total == sum(len(pair.dependents) for document in documents for pair in document)
    assert (found.documents, found.sentences) == (3, sum(map(len, documents)))


LEARNING = [
    "vocabulary.size=400", "data.documents=marker", "model.hidden_size=64", "model.ffn_size=128", "model.norm=pre",
    "model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0", "training.label_smoothing=0",
    "training.batch_tokens=1000", "training.schedule=inverse-sqrt", "training.learning_rate=3e-3",
    "training.warmup=100", "training.device=cpu", "validation.metric=loss", "checkpoint.every=1000000",
]  # fmt: skip


def draw_openings(count, split):
    """The first two sentences of documents in which the second has a word that the first decides."""
    found = (document[:2] for document in draw_documents(1_000_000, 1, split))
    terms = (pairs for pairs in found if [row.kind for row in pairs[1].dependents] == ["term"])
    return [next(terms) for _ in range(count)]


def train_and_count(folder, openings, tests, steps, segment):
    """Share of right terms after training on openings, in segments or sentence by sentence."""
    for side in ("source", "target"):
        lines = (line for pairs in openings for line in ("<d>", *(getattr(pair, side) for pair in pairs)))
        (folder / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = [f"data.{side}={folder / side}" for side in ("source", "target")]
    config = load_config(None, [*LEARNING, *files, f"data.segment_length={segment}", f"training.steps={steps}"])
    train(config, folder / f"run-{segment}")
    translator = Translator.from_run(folder / f"run-{segment}", "latest", device="cpu")
    found = translate(translator, [[pair.source for pair in pairs] for pairs in tests], SearchOptions(beam=1))
    dependents = [pair.dependents for pairs in tests for pair in pairs]
    return count_agreement([text for each in found for text in each.sentences], dependents)["term"]


@pytest.fixture
def openings():
    return draw_openings(500, "train"), draw_openings(100, "test")


def test_a_model_of_documents_knows_what_an_earlier_sentence_decides(openings, tmp_path):
    assert train_and_count(tmp_path, *openings, steps=220, segment=64).share > 0.9


@pytest.mark.slow
def test_a_model_of_sentences_can_only_guess_it(openings, tmp_path):
    found = train_and_count(tmp_path, *openings, steps=150, segment=0)
    assert 0.35 < found.share < 0.65
    assert found.neither < 10  # it has learned to translate
