"""Records of a translator against attention computed by hand, pair by pair and dense."""

import dataclasses
import random
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from closeness import peak_allocation

from rectiformer.analyze.observe import observe
from rectiformer.analyze.record import read_record, to_json, write_record
from rectiformer.analyze.recording import model_card, record_pairs
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, DataError
from rectiformer.measure.alignment import Links
from rectiformer.model.transformer import Transformer
from rectiformer.ops.weights import BLOCK_CELLS
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]
WEIGHING = {"softmax": lambda x: x.softmax(-1), "rela": lambda x: x.clamp_min(0).nan_to_num()}


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(generate_lines(200), VocabularyConfig(size=340, byte_fallback=True))


def build_translator(vocabulary, variant="rela-g", max_length=80, **sizes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 2, "ffn_size": 16, **sizes}
    model = Transformer(ModelConfig(variant=variant, **sizes), vocabulary.size, vocabulary.size).double()
    return Translator(model, vocabulary, vocabulary, max_length=max_length)


@pytest.fixture(scope="module")
def translator(vocabulary):
    return build_translator(vocabulary)


def weights_by_hand(translator, source, target):
    """By kind and layer the weights [H, M, N] of one pair by itself, from the layers' own projections."""
    model, found = translator.model.eval(), {}

    def attend(attention, x, context, causal):
        q, k, _ = attention.project(x, context, None)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return WEIGHING["softmax" if attention.variant == "softmax" else "rela"](scores)[0].detach()

    x = model.source_embedding(torch.tensor([[*translator.source.encode(source), translator.source.eos]]))
    for index, layer in enumerate(model.encoder):
        found["encoder", index] = attend(layer.attention, x, None, False)
        x = layer(x, None)
    context = model.encoder_norm(x)
    x = model.target_embedding(torch.tensor([[translator.target.bos, *translator.target.encode(target)]]))
    for index, layer in enumerate(model.decoder):
        found["decoder", index] = attend(layer.attention, x, None, True)
        middle = layer.around_attention(x, lambda x, layer=layer: layer.attention(x, causal=True))
        found["cross", index] = attend(layer.cross, middle, context, False)
        x = layer(x, context, None)
    return found


@pytest.mark.parametrize("variant", ["rela-g", "softmax"])
def test_records_hold_the_weights_of_the_model(vocabulary, variant):
    translator = build_translator(vocabulary, variant)
    pairs = [*zip(generate_lines(7, 1), generate_lines(7, 2), strict=True), ("", "das"), ("das", ""), ("", "")]
    record = record_pairs(translator, pairs)
    assert [(example.source.text, example.target.text) for example in record.examples] == pairs
    zeros = nulls = 0
    for example, pair in zip(record.examples, pairs, strict=True):
        expected = weights_by_hand(translator, *pair)
        assert {(site.kind, site.layer) for site in example.sites} == set(expected)
        for (kind, layer), weights in expected.items():
            site, weights = example.site(kind, layer), weights.numpy()
            assert site.dense() == pytest.approx(weights, rel=1e-5, abs=1e-7)
            assert (site.dense() != 0).tolist() == (weights != 0).tolist()
            assert site.mass == pytest.approx(weights.sum(-1).ravel(), rel=1e-6, abs=1e-7)
            visible = np.arange(1, site.queries + 1) if kind == "decoder" else np.full(site.queries, site.keys)
            assert site.visible.tolist() == np.tile(visible, site.heads).tolist()
            assert site.null.tolist() == (weights == 0).all(-1).ravel().tolist()
            zeros += (weights == 0).sum()
            nulls += site.null.sum()
    assert (nulls > 0) == (variant == "rela-g")
    assert zeros > 0  # of a softmax, the keys that a causal mask hides


def test_a_record_of_a_model_survives_its_file(translator, tmp_path):
    record = record_pairs(
        translator, [("das Haus", "der Hund"), ("am Fluss", "das")], [Links(frozenset({(1, 1)})), None]
    )
    write_record(record, tmp_path / "a.json.gz")
    assert to_json(read_record(tmp_path / "a.json.gz")) == to_json(record)


def test_a_long_pair_in_blocks_is_the_same_as_at_once(vocabulary):
    translator = build_translator(vocabulary, max_length=700, num_heads=4)
    line = " ".join(generate_lines(130, 3))
    example = record_pairs(translator, [(line, line)], sites=["cross", "decoder"], layers=[1]).examples[0]
    expected = weights_by_hand(translator, line, line)
    for site in example.sites:
        assert site.heads * site.queries * site.keys > BLOCK_CELLS
        np.testing.assert_allclose(site.dense(), expected[site.kind, 1].numpy(), rtol=1e-5, atol=1e-7)


def test_memory_is_that_of_what_is_not_zero(vocabulary):
    """Heads that weigh few of 950 keys: not even one attention's dense weights may ever be held."""
    translator = build_translator(vocabulary, max_length=1200, hidden_size=64, num_heads=8, decoder_layers=1)
    for site in translator.model.sites():  # a query and a key that point away from each other
        site.attention.input_bias.data[:64], site.attention.input_bias.data[64:128] = 1.5, -1.5
    line = " ".join(generate_lines(200, 3))
    record = record_pairs(translator, [(line, line)])
    sites = record.examples[0].sites
    assert len(sites) == 3
    dense = 8 * sites[0].heads * sites[0].queries * sites[0].keys  # bytes in float64, as the model has it
    stored = sum(array.nbytes for site in sites for array in vars(site).values() if isinstance(array, np.ndarray))
    assert 0 < stored < dense / 20
    tracemalloc.start()
    record_pairs(translator, [(line, line)])
    peak = tracemalloc.get_traced_memory()[1]  # numpy's arrays
    tracemalloc.stop()
    held = peak_allocation(lambda: record_pairs(translator, [(line, line)]))  # torch's, the model's own among them
    assert peak < stored + dense / 8
    assert held < dense / 3


def test_negative_weights_are_kept(vocabulary):
    example = record_pairs(build_translator(vocabulary, "cog"), [("das kleine Haus", "der Hund")]).examples[0]
    assert min(site.weights.min() for site in example.sites) < 0


def test_attention_without_weights_is_left_out(vocabulary):
    translator = build_translator(vocabulary, encoder_variant="inhibitor")
    record = record_pairs(translator, [("das", "der")])
    assert {site.kind for site in record.examples[0].sites} == {"decoder", "cross"}
    assert record.model.variants == {"encoder": "inhibitor", "decoder": "rela-g", "cross": "rela-g"}


def test_pieces_and_words_follow_the_text(translator):
    text = "das Haus, (sieht) 東京 x\u0301!"
    side = record_pairs(translator, [(text, "")]).examples[0].source
    assert [text[start:stop] for _, _, start, stop in side.words] == [
        "das", "Haus", ",", "(", "sieht", ")", "東", "京", "x\u0301", "!",
    ]  # fmt: skip
    for first, last, start, stop in side.words:
        covered = {offset for piece in side.pieces[first:last] for offset in range(piece.start, piece.stop)}
        assert set(range(start, stop)) <= covered
    assert side.pieces[-1] == ("</s>", len(text), len(text))
    assert len(side.pieces) == len(translator.source.encode(text)) + 1
    tokenized = record_pairs(translator, [(text, "")], tokenized=True).examples[0].source
    assert [text[start:stop] for _, _, start, stop in tokenized.words] == text.split(" ")


@pytest.mark.parametrize(
    "text", ["</script>", "a\0b", "x\u2028y", "\u202egnp", "👩‍🚀 das", "\u0301", "\ud800 das", "▁ das", " ", "z" * 79]
)
def test_hostile_texts_are_recorded_as_they_are(translator, text, tmp_path):
    record = record_pairs(translator, [(text, text)])
    write_record(record, tmp_path / "a.json")
    example = read_record(tmp_path / "a.json").examples[0]
    assert (example.source.text, example.target.text) == (text, text)


def test_the_models_own_translations_stand_next_to_the_targets(translator):
    lines = [*generate_lines(3, 5), ""]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model may run into its length limit
        record = record_pairs(translator, [(line, "das") for line in lines], name="mine", translate=True)
        own = [each.text for each in translator.translate(lines, SearchOptions())]
    assert record.model.name == "mine"
    assert [(example.target.text, example.forced) for example in record.examples] == [("das", True)] * 4
    assert [example.translation for example in record.examples] == own


def test_names_and_layers_choose_sites(translator):
    def chosen(**options):
        example = record_pairs(translator, [("das", "der")], **options).examples[0]
        return [(site.kind, site.layer) for site in example.sites]

    assert chosen() == [("encoder", 0), ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert chosen(sites=["cross"]) == [("cross", 0), ("cross", 1)]
    assert chosen(layers=[1]) == [("decoder", 1), ("cross", 1)]
    assert chosen(sites=["encoder"], layers=[0]) == [("encoder", 0)]
    assert chosen(layers=[]) == []


FAILURES = [
    ({"sites": ["self"]}, ArgumentError, r"unknown attention site 'self'"),
    (
        {"layers": [2]},
        ArgumentError,
        r"attention has index 2; indices count from 0, and the encoder has 1 layers, the decoder 2",
    ),
    ({"sites": ["encoder"], "layers": [1]}, ArgumentError, r"no layer of encoder attention has index 1"),
    ({"gold": []}, DataError, r"2 sentence pairs for 0 gold alignments"),
    (
        {"gold": [None, Links(frozenset({(0, 0)}), frozenset({(0, 3)}))]},
        DataError,
        r"pair 2: link 0-3 is beyond the sentence, which has 2 source and 3 target words",
    ),
    ({"pairs": [("das", "z" * 100)]}, DataError, r"pair 1: 1 source and \d+ target subwords, but at most 80"),
    ({"pairs": [("das", "das"), ("z" * 100, "")]}, DataError, r"pair 2: \d+ source and 0 target subwords"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), FAILURES)
def test_each_mistake_is_one_clear_line(translator, arguments, error, message):
    pairs = [("das", "das"), ("der Hund", "am alten Fluss")]
    with pytest.raises(error, match=message) as raised:
        record_pairs(translator, **{"pairs": pairs, **arguments})
    assert "\n" not in str(raised.value)
    assert all(site.attention.observer is None for site in translator.model.sites())


def test_a_card_tells_models_apart(translator, vocabulary):
    card = model_card(translator.model)
    assert card == model_card(build_translator(vocabulary).model)
    assert (card.name, card.layers, card.heads) == ("rela-g", {"encoder": 1, "decoder": 2}, 2)
    other = build_translator(vocabulary).model
    other.output.data[0, 0] += 1
    assert model_card(other).id != card.id
    assert dataclasses.replace(model_card(other, "mine"), id=card.id) == dataclasses.replace(card, name="mine")


def test_an_observed_transformer_shows_what_a_record_of_it_holds(translator):
    pairs = [("das kleine Haus", "der Hund sieht"), ("am", "und zwei alten")]
    ids = [[*translator.source.encode(source), translator.source.eos] for source, _ in pairs]
    inputs = [[translator.target.bos, *translator.target.encode(target)] for _, target in pairs]
    source = torch.tensor([row + [0] * (max(map(len, ids)) - len(row)) for row in ids])
    assert len(inputs[0]) == len(inputs[1])
    with translator.inference(), observe(translator.model) as seen:
        translator.model(source, torch.tensor([len(row) for row in ids]), torch.tensor(inputs))
    for index, example in enumerate(record_pairs(translator, pairs).examples):
        mine = seen.record().examples[index]
        assert [(site.kind, site.layer) for site in mine.sites] == [(site.kind, site.layer) for site in example.sites]
        for site, expected in zip(mine.sites, example.sites, strict=True):
            assert site.dense() == pytest.approx(expected.dense(), rel=1e-5, abs=1e-7)
            weights = seen.weights(site.kind, site.layer)[index]
            np.testing.assert_array_equal(weights[:, : site.queries, : site.keys], site.dense())
            assert not weights[:, :, site.keys :].any()
    card = seen.record().model
    assert (card.name, card.layers, card.heads) == ("Transformer", {"encoder": 1, "decoder": 2}, 2)
    assert card.variants == {"encoder": "rela-g", "decoder": "rela-g", "cross": "rela-g"}
