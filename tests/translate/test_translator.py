"""Lines in, translations out: as many, in order, the same whatever else is translated with them."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rectiformer.config import Config, ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, DataError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import save_checkpoint
from rectiformer.runs.folder import create_run, weights_of
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator, cut_batches, is_repetitive, piece_text

SMALL = ModelConfig(
    hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=16, dropout=0.5, tie_embeddings="none"
)
COPYING = replace(SMALL, hidden_size=32, tie_embeddings="all")
WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]
QUICK = SearchOptions(beam=2, extra_length=3)
HOSTILE = [
    "",
    "das Haus",
    " \t ",
    "\u2028",
    "das\u2028Haus\u2029steht\u0085am\rFluss",
    "\0",
    "das\0Haus",
    "\ufeffdas Haus",
    "\u202edas\u202c \u2066Haus\u2069",
    "\u0301\u0301 e\u0301",
    "\ud800 Haus",
    "日本語 😀",
    "xa" * 250,
    "",
]


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) + draw.choice([".", "!", ""]) for _ in range(count)]


def build_translator(max_length=40, **vocabulary):
    """A random model in float64, so that the sizes of batches, which round differently, decide no tie."""
    words = Vocabulary.train(generate_lines(200), VocabularyConfig(**({"size": 60} | vocabulary)))
    torch.manual_seed(0)
    model = Transformer(SMALL, words.size, words.size, bos=words.bos).double()
    with torch.no_grad():
        model.output.mul_(4)  # an untrained model is near uniform; this one is sure of something
        model.output[words.eos].mul_(2)  # and ends now and then
    return Translator(model, words, words, max_length=max_length)


@pytest.fixture(scope="module")
def translator():
    return build_translator()


def prefer(translator, piece):
    """Make `piece` the likeliest of all, whatever the source."""
    norm = translator.model.decoder[-1].around_memory.norm
    size = translator.target.size
    found = next(token for token in range(size) if piece_text(translator.target, token) == piece)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        translator.model.output[found] = 10.0


def essence(translations):
    return [
        (each.line, each.source, [(best.text, best.tokens, best.ended) for best in each.candidates], each.warnings)
        for each in translations
    ]


@pytest.mark.parametrize("how", [{"batch_sentences": size} for size in (1, 7, 64)] + [{"batch_tokens": 100}], ids=str)
def test_batches_change_nothing(translator, how):
    lines = [*generate_lines(65, seed=1), "", "das"]
    options = SearchOptions(beam=2, nbest=2, extra_length=0)
    expected = translator.translate(lines, options)
    found = translator.translate(lines, options, **how)
    assert essence(found) == essence(expected)
    assert [best.score for each in found for best in each.candidates] == pytest.approx(
        [best.score for each in expected for best in each.candidates], rel=1e-5
    )
    assert len({each.text for each in expected}) > 10  # the model does tell sentences apart


def test_samples_do_not_depend_on_batches_but_on_line_numbers(translator):
    options = SearchOptions(sample=True, nbest=2, extra_length=3)
    lines = ["das Haus"] * 9
    expected = translator.translate(lines, options)
    assert essence(translator.translate(lines, options, batch_sentences=1)) == essence(expected)
    assert essence(translator.translate(lines[:2], options, first_line=4)) == essence(expected[3:5])
    assert len({each.text for each in expected}) > 1


def test_equal_parts_of_a_split_line_draw_their_own_samples(translator):
    sentence = "das Haus steht am Fluss. "
    fitting = translator.max_length // len(translator.source.encode(sentence))
    [found] = translator.translate(
        [sentence * fitting * 3], SearchOptions(sample=True, extra_length=3), warn=lambda message: None
    )
    assert found.warnings[0].endswith("translated in 3 parts")
    tokens = found.candidates[0].tokens
    assert tokens != tokens[: len(tokens) // 3] * 3


@pytest.mark.parametrize("beam", [1, 2])
def test_hostile_lines_keep_their_order(translator, beam):
    warned = []
    found = translator.translate(HOSTILE, SearchOptions(beam=beam, extra_length=3), warn=warned.append)
    assert [each.source for each in found] == HOSTILE
    assert [each.line for each in found] == list(range(1, len(HOSTILE) + 1))
    assert all(each.text == "" for each in found if not each.source.strip())
    assert all(each.candidates[0].tokens for each in found if each.source.strip())
    assert all("\n" not in each.text for each in found)
    assert [message.split(":")[0] for message in warned] == [f"line {HOSTILE.index('xa' * 250) + 1}"]


def test_blank_lines_never_reach_the_model(translator):
    calls = []
    with translator.model.source_embedding.register_forward_hook(lambda *call: calls.append(call)):
        found = translator.translate(["", " ", "\t"], SearchOptions(nbest=4))
        assert (len(found), calls) == (3, [])
        translator.translate(["das"], QUICK)
    assert calls


def test_no_lines_give_no_translations(translator):
    assert translator.translate([], QUICK) == []


def test_n_best_are_sorted_and_blank_lines_have_one(translator):
    found = translator.translate(["das Haus", "", "der Hund"], SearchOptions(beam=4, nbest=4, extra_length=3))
    assert [len(each.candidates) for each in found] == [4, 1, 4]
    for each in found:
        ended = [best.score for best in each.candidates if best.ended]
        assert ended == sorted(ended, reverse=True)
        for best in each.candidates:
            assert len(best.tokens) == len(best.token_scores)
            assert sum(best.token_scores) == pytest.approx(best.log_probability, rel=1e-5)


def test_a_line_of_100k_subwords_is_split_and_changes_no_other():
    translator = build_translator(max_length=100)
    sentence = "das kleine Haus steht am alten Fluss. "
    subwords = len(translator.source.encode(sentence))
    long = sentence * (100_000 // subwords + 1)
    warned = []
    options = SearchOptions(beam=1, extra_length=0)
    found = translator.translate(["das Haus", long, "der Hund"], options, batch_tokens=50_000, warn=warned.append)
    assert len(found) == 3
    count = len(translator.source.encode(long))
    parts = -(-count // (100 // subwords * subwords))  # whole sentences, as many as fit
    assert warned == [f"line 2: {count} subwords, more than 100; translated in {parts} parts"]
    assert found[1].warnings[0] == warned[0].removeprefix("line 2: ")
    alone = translator.translate(["das Haus", "der Hund"], options)
    assert [found[0].text, found[2].text] == [each.text for each in alone]
    part = translator.translate([sentence * (100 // subwords)], options)[0].text
    assert found[1].text.startswith(f"{part} {part} ")


def test_a_long_line_is_cut_or_refused_as_asked(translator):
    line = " ".join(["Haus"] * 200)
    warned = []
    ids = translator.source.encode(line)
    [found] = translator.translate([line], QUICK, too_long="cut", warn=warned.append, first_line=7)
    assert warned == [f"line 7: {len(ids)} subwords, cut to the first 40"]
    assert found.source == line
    start = translator.source.decode(ids[:40])
    assert translator.source.encode(start) == ids[:40]
    assert found.text == translator.translate([start], QUICK)[0].text
    with pytest.raises(DataError, match=rf"line 7: {len(ids)} subwords, but at most 40 are translated at once"):
        translator.translate([line], QUICK, too_long="error", first_line=7)


def test_translations_begin_with_their_prefix(translator):
    prefixes = ["der Hund", "", "zwei Katzen"]
    found = translator.translate(["das Haus steht am Fluss"] * 3, QUICK, prefixes=prefixes)
    assert all(each.text.startswith(prefix) for each, prefix in zip(found, prefixes, strict=True))
    free = translator.translate(["das Haus steht am Fluss"], QUICK)
    assert found[1].text == free[0].text
    with pytest.raises(DataError, match="1 prefixes for 2 lines"):
        translator.translate(["a", "b"], QUICK, prefixes=["x"])
    with pytest.raises(DataError, match=r"line 1: its prefix has .* subwords, but at most 40"):
        translator.translate(["das"], QUICK, prefixes=["Hund " * 50])


def test_only_the_first_part_of_a_split_line_has_the_prefix(translator):
    line = "das Haus steht. " * 30
    [found] = translator.translate([line], QUICK, prefixes=["zwei Katzen am Fluss"], warn=lambda message: None)
    assert found.text.startswith("zwei Katzen am Fluss")
    assert found.text.count("zwei Katzen am Fluss") == 1


def test_a_line_feed_spelled_as_a_byte_makes_no_line():
    translator = build_translator(size=320, byte_fallback=True)
    prefer(translator, "<0x0A>")
    [found] = translator.translate(["das Haus steht am Fluss"], QUICK)
    assert "<0x0A>" in found.candidates[0].tokens
    assert "\n" not in found.text


def test_a_translation_without_end_says_so(translator):
    found = translator.translate(generate_lines(20), SearchOptions(beam=1, extra_length=0))
    for each in found:
        assert ("the translation met its length limit before it ended" in each.warnings) == (
            not each.candidates[0].ended
        )
    assert {each.candidates[0].ended for each in found} == {True, False}


def test_a_model_in_training_is_left_in_training(translator):
    expected = translator.translate(generate_lines(5), QUICK)
    translator.model.train()
    assert essence(translator.translate(generate_lines(5), QUICK)) == essence(expected)  # and dropout was off
    assert translator.model.training
    translator.model.eval()


def test_progress_counts_up_to_all(translator):
    seen = []
    translator.translate(generate_lines(5), QUICK, batch_sentences=2, progress=lambda *counts: seen.append(counts))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_a_run_folder_is_all_a_translator_needs(tmp_path, translator):
    vocabulary = translator.source
    run = create_run(tmp_path / "run", Config(model=SMALL), vocabulary, vocabulary, data_hash="")
    weights = {name: tensor.float() for name, tensor in weights_of(translator.model).items()}
    save_checkpoint(run.path, 5, {"model": weights}, {}, run.identity, best=True)
    loaded = Translator.from_run(run.path, device="cpu")
    model = Transformer(SMALL, vocabulary.size, vocabulary.size)
    model.load_state_dict({name: tensor.float() for name, tensor in translator.model.state_dict().items()})
    expected = Translator(model, vocabulary, vocabulary).translate(generate_lines(5), QUICK)
    assert essence(loaded.translate(generate_lines(5), QUICK)) == essence(expected)


def test_a_run_in_bf16_holds_its_weights_in_bf16_and_says_the_same(tmp_path, translator):
    vocabulary = translator.source
    run = create_run(tmp_path / "run", Config(model=COPYING), vocabulary, vocabulary, data_hash="")
    torch.manual_seed(0)
    model = Transformer(COPYING, vocabulary.size, vocabulary.size)
    model.output.data.mul_(4)  # tied to what it reads, the model is sure of something that depends on the source
    save_checkpoint(run.path, 5, {"model": weights_of(model)}, {}, run.identity, best=True)
    wide, narrow = (Translator.from_run(run.path, device="cpu", precision=each) for each in ("fp32", "bf16"))
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    assert narrow.model.output is narrow.model.source_embedding.table
    assert torch.equal(narrow.model.target_embedding.positions, wide.model.target_embedding.positions)
    lines = generate_lines(10)
    options = SearchOptions(beam=2, extra_length=0)
    expected = [each.text for each in wide.translate(lines, options)]
    assert [each.text for each in narrow.translate(lines, options)] == expected
    assert len(set(expected)) > 5


def test_a_shared_model_keeps_its_own_weights(translator):
    model = Transformer(SMALL, translator.source.size, translator.target.size)
    Translator(model, translator.source, translator.target, precision="bf16").translate(generate_lines(2), QUICK)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precisions_translate(translator, precision):
    model = Transformer(SMALL, translator.source.size, translator.target.size)
    half = Translator(model, translator.source, translator.target, precision=precision)
    assert len(half.translate(generate_lines(5), QUICK)) == 5


def test_arguments_without_sense_are_refused(translator):
    model, words = translator.model, translator.source
    with pytest.raises(ArgumentError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        Translator(model, words, words, precision="bf61")
    with pytest.raises(ArgumentError, match="unknown device 'gpu'; use auto, cpu or cuda"):
        Translator(model, words, words, device="gpu")
    with pytest.raises(ArgumentError, match="max_length = 0"):
        Translator(model, words, words, max_length=0)
    with pytest.raises(ArgumentError, match="unknown value of too_long 'spilt'; did you mean 'split'"):
        translator.translate(["a"], QUICK, too_long="spilt")
    with pytest.raises(ArgumentError, match="batch_tokens = 0"):
        translator.translate(["a"], QUICK, batch_tokens=0)


@given(st.lists(st.integers(1, 30)), st.integers(1, 60), st.integers(0, 5))
def test_batches_hold_every_sentence_once_within_the_budget(lengths, tokens, sentences):
    batches = list(cut_batches(range(len(lengths)), lengths, tokens, sentences))
    assert list(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert len(batch) == 1 or (len(batch) <= sentences if sentences else padded <= tokens)
    for batch, following in itertools.pairwise(batches):  # one more would not have fitted
        longest = max(lengths[index] for index in [*batch, following[0]])
        assert len(batch) == sentences if sentences else (len(batch) + 1) * longest > tokens


@given(st.lists(st.integers(0, 1), max_size=24), st.integers(2, 5))
def test_repetition_is_a_block_that_stands_several_times(ids, times):
    blocks = ((start, size) for size in range(1, 9) for start in range(len(ids) - size * times + 1))
    expected = any(ids[start : start + size * times] == ids[start : start + size] * times for start, size in blocks)
    assert is_repetitive(ids, times) == expected


def test_a_translation_that_repeats_itself_says_so():
    translator = build_translator()
    prefer(translator, "a")
    note = "the translation says something 4 times in a row"
    [found] = translator.translate(["das Haus steht am Fluss"], QUICK)
    assert found.warnings[-1] == note
    [free] = translator.translate(["das Haus steht am Fluss"], SearchOptions(beam=1, extra_length=3, max_repeats=2))
    assert note not in free.warnings


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named_and_auto_does_without(translator):
    model, words = translator.model, translator.source
    assert Translator(model, words, words, device="auto").device.type == "cpu"
    with pytest.raises(ArgumentError, match="device 'cuda', but torch finds no GPU here; use auto or cpu"):
        Translator(model, words, words, device="cuda")
