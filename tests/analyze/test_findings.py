"""A test set through a model: every number against a dense recomputation, the file it is kept in, and bad input."""

import dataclasses
import itertools
import json
import random

import pytest
import torch
import torch.nn.functional as F
from analyze.dense import entropy, lengths_densely, look_densely, summarize_densely
from closeness import peak_allocation

from rectiformer.analyze.findings import analyze
from rectiformer.analyze.survey import (
    MemoryObserver,
    SiteObserver,
    forced_batches,
    memory_layers,
    run_survey,
    shuffle_sources,
    weighing_sites,
)
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import DataError
from rectiformer.measure.alignment import Links
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.align import alignment_table
from rectiformer.translate.evaluate import EncodedPairs
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund", "sieht", "zwei", "Katzen"]


def all_observers(model, edges):
    memories = [MemoryObserver(*each) for each in memory_layers(model)]
    return [*(SiteObserver(site, edges) for site in weighing_sites(model)), *memories]


def generate_lines(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


VOCABULARY = Vocabulary.train(generate_lines(200), VocabularyConfig(size=60))
PAIRS = [*zip(generate_lines(16, 1), generate_lines(16, 2), strict=True), ("", "das"), ("das", "")]


def build_translator(variant="rela-g", **changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "ffn_size": 48,
        "dropout": 0.1,
    }
    model = Transformer(ModelConfig(variant=variant, **{**sizes, **changes}), VOCABULARY.size, VOCABULARY.size)
    return Translator(model, VOCABULARY, VOCABULARY, max_length=3000)


def train(translator, steps=60):
    """Teach a model to copy, somewhat: enough for heads that differ and rows that are null."""
    batch = next(forced_batches(translator, [(line, line) for line in generate_lines(30, 3)]))
    real = torch.arange(batch.target.shape[1]) < batch.target_lengths[:, None]
    optimizer = torch.optim.Adam(translator.model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = translator.model(batch.source, batch.source_lengths, batch.target_input)
        F.cross_entropy(logits[real], batch.target[real]).backward()
        optimizer.step()
    return translator


@pytest.fixture(scope="module")
def trained():
    """Translators by variant; each is trained once."""
    found = {}

    def get(variant):
        if variant not in found:
            found[variant] = train(build_translator(variant))
        return found[variant]

    return get


@pytest.fixture(scope="module")
def found(trained):
    return analyze(trained("rela-g"), PAIRS, name="copies", quality=False)


@pytest.mark.parametrize("variant", ["rela-g", "softmax", "cog"])
def test_streaming_equals_a_dense_recomputation(trained, variant):
    translator = trained(variant)
    found = analyze(translator, PAIRS, quality=False)
    weights, _ = look_densely(translator, PAIRS)
    assert [(site.kind, site.layer) for site in found.sites] == list(weights)
    for site in found.sites:
        expected = summarize_densely(site.kind, weights[site.kind, site.layer])
        assert vars(site.diversity) == pytest.approx(expected.pop("diversity"), abs=1e-6)
        for name, values in expected.items():
            assert getattr(site, name) == pytest.approx(values, abs=1e-6), (site.kind, site.layer, name)


def test_the_trained_model_has_what_is_to_be_measured(found):
    """Otherwise the comparisons above would be between zeros."""
    (cross,) = [site for site in found.sites if (site.kind, site.layer) == ("cross", 1)]
    assert all(0.2 < rate < 1 for rate in cross.sparsity)
    assert max(cross.null_rate) > 0
    assert cross.diversity.js > 0.05


def test_softmax_has_no_zeros_and_no_null_rows(trained):
    for site in analyze(trained("softmax"), PAIRS, quality=False).sites:
        assert site.sparsity == site.null_rate == [0.0] * 4
        assert site.active_queries == [1.0] * 4
        assert site.mass == pytest.approx([1.0] * 4, abs=1e-6)
        assert (site.diversity.dropped, site.diversity.support_overlap) == (0.0, 1.0)
        assert site.diversity.js == site.diversity.js_zero


def test_lengths_equal_a_dense_recomputation(trained, found):
    weights, _ = look_densely(trained("rela-g"), PAIRS)
    lengths = [len(VOCABULARY.encode(source)) + 1 for source, _ in PAIRS]
    for each in found.by_length:
        assert len(each.lengths) > 4
        for index, (start, stop) in enumerate(itertools.pairwise(each.lengths)):
            inside = [
                sentence
                for length, sentence in zip(lengths, weights[each.kind, each.layer], strict=True)
                if start <= length < stop
            ]
            measured = each.sparsity[index], each.null_rate[index], each.rows[index]
            assert measured == pytest.approx(lengths_densely(each.kind, inside), abs=1e-9)


def test_gold_and_shuffled_sources_equal_a_dense_recomputation(trained, found):
    for pairs, measured in ((PAIRS, found.shuffled.gold), (shuffle_sources(PAIRS), found.shuffled.shuffled)):
        weights, _ = look_densely(trained("rela-g"), pairs)
        for layer in range(2):
            masses = torch.cat([sentence.sum(-1).flatten() for sentence in weights["cross", layer]])
            assert measured.mass[layer] == pytest.approx(masses.mean().item(), abs=1e-6)
            assert measured.null_rate[layer] == pytest.approx((masses == 0).double().mean().item(), abs=1e-9)
    assert found.shuffled.gold != found.shuffled.shuffled


def test_memories_equal_a_dense_recomputation(trained, found):
    _, memories = look_densely(trained("rela-g"), PAIRS)
    assert [(each.side, each.layer) for each in found.memories] == list(memories)
    for each in found.memories:
        weights, output, stream = (
            torch.cat(parts).double() for parts in zip(*memories[each.side, each.layer], strict=True)
        )
        usage = weights.sum(0) / weights.sum()
        ordered = weights.sort(-1, descending=True).values
        weighed = weights.sum(-1) > 0
        assert each.variance_ratio == pytest.approx(
            (output.var(correction=0) / stream.var(correction=0)).item(), abs=1e-6
        )
        for share, kept in (("0.002", 1), ("0.01", 1), ("0.1", 5)):
            held = (ordered[:, :kept].sum(-1) / ordered.sum(-1))[weighed].mean().item()
            assert each.top_score_ratio[share] == pytest.approx(held, abs=1e-6)
        assert each.slots == 48
        assert each.used_slots == pytest.approx((usage > 0).double().mean().item())
        assert each.usage_entropy == pytest.approx(entropy(usage).item(), abs=1e-6)


def test_alignment_is_that_of_the_alignment_table(trained):
    translator = trained("rela-g")
    gold = [Links(frozenset({(0, 0)} if source and target else ())) for source, target in PAIRS]
    found = analyze(translator, PAIRS, gold=gold, quality=False)
    rows = alignment_table(translator, PAIRS, gold)
    assert [vars(each) for each in found.alignment] == [
        {"layer": row.layer, "head": row.head, "induction": row.induction}
        | {name: getattr(row.score, name) for name in ("aer", "precision", "recall")}
        for row in rows
    ]
    assert len(found.alignment) == 2 * 5 * 2


def test_quality_is_bleu_with_its_signature(trained):
    found = analyze(trained("rela-g"), PAIRS[:3])
    assert 0 <= found.quality.bleu <= 100
    assert "version:" in found.quality.signature


def test_cards_say_what_was_measured(found):
    assert (found.model.name, found.model.heads, found.model.layers) == ("rela-g", 4, {"encoder": 1, "decoder": 2})
    lengths = [[len(VOCABULARY.encode(text)) + 1 for text in texts] for texts in zip(*PAIRS, strict=True)]
    assert vars(found.data) == {
        "name": "copies",
        "sentences": len(PAIRS),
        "source_tokens": sum(lengths[0]),
        "target_tokens": sum(lengths[1]),
        "documents": 0,
        "segments": 0,
    }


def test_the_model_is_left_as_it_was(trained):
    translator = trained("rela-g")
    translator.model.train()
    analyze(translator, PAIRS[:2], quality=False)
    assert translator.model.training
    assert all(site.attention.observer is None for site in translator.model.sites())
    assert all(memory.observer is None for memory in translator.model.memories())


def test_progress_counts_both_passes(trained):
    told = []
    analyze(trained("rela-g"), PAIRS, quality=False, progress=lambda done, of: told.append((done, of)))
    assert told == sorted(told)
    assert told[-1] == (2 * len(PAIRS), 2 * len(PAIRS))


def test_one_pair_has_no_shuffle(trained):
    assert analyze(trained("rela-g"), PAIRS[:1], quality=False).shuffled is None


@pytest.mark.parametrize("count", [2, 3, 10, 101])
def test_shuffled_sources_are_all_used_and_none_stays(count):
    pairs = [(f"source {index}", f"target {index}") for index in range(count)]
    mixed = shuffle_sources(pairs)
    assert [target for _, target in mixed] == [target for _, target in pairs]
    assert sorted(source for source, _ in mixed) == sorted(source for source, _ in pairs)
    assert not set(mixed) & set(pairs)
    assert mixed == shuffle_sources(pairs)


@pytest.mark.parametrize(
    ("changes", "sites", "missing"),
    [
        ({"variant": "inhibitor"}, set(), ["cross", "encoder", "decoder"]),
        ({"variant": "rela-g", "cross_variant": "inhibitor"}, {"encoder", "decoder"}, ["cross"]),
    ],
)
def test_attention_without_weights_is_left_out_with_a_note(changes, sites, missing):
    notes = []
    found = analyze(
        build_translator(**changes), PAIRS, gold=[Links(frozenset())] * len(PAIRS), quality=False, warn=notes.append
    )
    assert {site.kind for site in found.sites} == sites
    assert (found.alignment, found.shuffled) == (None, None)
    assert len(found.memories) == 3
    assert notes == [f"{kind} attention is 'inhibitor', which has no weights; it is left out" for kind in missing]


def test_findings_survive_the_file(found, tmp_path):
    found.write(tmp_path / "findings.json")
    content = json.loads((tmp_path / "findings.json").read_text())
    assert content == found.to_json()
    assert (content["format"], content["version"]) == ("rectiformer-findings", 1)
    assert content["model"]["written_by"].startswith("rectiformer ")
    assert set(content) == {"format", "version", *vars(found)}
    assert set(content["sites"][0]) == set(vars(found.sites[0]))


def test_a_folder_that_is_not_there_cannot_be_written_to(found, tmp_path):
    with pytest.raises(DataError, match=r"cannot write .*: No such file"):
        found.write(tmp_path / "none" / "f.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused_in_one_line(found, tmp_path, value):
    sites = [found.sites[0], dataclasses.replace(found.sites[1], mass=[0.0, value])]
    broken = dataclasses.replace(found, sites=sites)
    with pytest.raises(DataError) as refused:
        broken.write(tmp_path / "f.json")
    line = f"model 'rela-g' measures sites[1].mass[1] = {value}; its weights overflow; take another checkpoint"
    assert str(refused.value) == line
    assert not (tmp_path / "f.json").exists()


@pytest.mark.parametrize(
    ("pairs", "gold", "message"),
    [
        ([], None, "0 sentence pairs; there is nothing to analyze"),
        (PAIRS[:2], [Links(frozenset())], "2 sentence pairs for 1 gold alignments; each pair needs one"),
        ([("das", "das Haus")], [Links(frozenset({(0, 2)}))], "pair 1: link 0-2 is beyond the sentence"),
        ([("das " * 3001, "das")], None, "pair 1: .* but at most 3000 are read at once"),
    ],
)
def test_bad_input_is_refused_in_one_line(trained, pairs, gold, message):
    with pytest.raises(DataError, match=message) as refused:
        analyze(trained("rela-g"), pairs, gold=gold, quality=False)
    assert "\n" not in str(refused.value)


def test_tokenized_words_are_what_gold_counts(trained):
    pairs, gold = [("das .", "das...")], [Links(frozenset({(1, 0)}), frozenset({(1, 3)}))]
    analyze(trained("rela-g"), pairs, gold=gold, quality=False)
    with pytest.raises(DataError, match="beyond the sentence, which has 2 source and 1 target words"):
        analyze(trained("rela-g"), pairs, gold=gold, quality=False, tokenized=True)


def test_a_document_never_has_all_its_weights_in_memory():
    """All measures together take less than the weights of one attention, which would grow sixteenfold."""
    translator = build_translator(hidden_size=32, num_heads=8, decoder_layers=1)
    translator.model.double()

    def peak(words):
        document = " ".join(random.Random(0).choices(WORDS, k=words))
        length = len(VOCABULARY.encode(document)) + 1

        def work():
            observers = all_observers(translator.model, [1, length + 1])
            run_survey(observers, translator, EncodedPairs(translator, [(document, document)]), lambda _: None)

        return length, peak_allocation(work)

    (short, little), (long, much) = peak(250), peak(1000)
    assert long > 3.9 * short
    assert much < 8 * long * long * 8
    assert much < 4 * little
