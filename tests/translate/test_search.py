"""Decoding with real Transformers: caches, batches, dropped rows and captured shapes change nothing."""

import gc
import weakref
from dataclasses import replace
from itertools import chain

import pytest
import torch
from recomputing import recomputing

import rectiformer.translate.cuda_graphs as cuda_graphs
import rectiformer.translate.search
from rectiformer import VARIANTS, ArgumentError
from rectiformer.config import ModelConfig
from rectiformer.model.transformer import Transformer
from rectiformer.translate.options import ABANDONED, SearchBatch, SearchOptions, Specials

VOCABULARY, SEPARATOR = 40, 4
SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3, separator=SEPARATOR)


def build_model(seed=0, eos=0.0, **config):
    """A random model with decided opinions; `eos` raises the logit of endings by about as much."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "encoder_layers": 1, "tie_embeddings": "none"}
    model = Transformer(
        ModelConfig(**{**sizes, **config}), VOCABULARY, VOCABULARY, SPECIALS.bos, (SEPARATOR,) * 2
    ).eval()
    with torch.no_grad():
        model.output.mul_(4)
        norm = model.decoder[-1].around_memory.norm if model.config.norm == "post" else model.decoder_norm
        norm.bias.copy_(torch.nn.functional.normalize(torch.randn(32), dim=0))
        model.output[SPECIALS.eos] += eos * norm.bias
    return model


def random_sources(count, longest=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (count,), generator=generator).tolist()
    return [[*torch.randint(4, VOCABULARY, (n,), generator=generator).tolist(), SPECIALS.eos] for n in lengths]


def assert_same(ours, theirs):
    """The same tokens, and scores that differ by float32's rounding only."""
    assert [[h.ids for h in best] for best in ours] == [[h.ids for h in best] for best in theirs]
    for one, other in zip(chain(*ours), chain(*theirs), strict=True):
        assert one.ended == other.ended
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-5)
        assert one.token_scores == pytest.approx(other.token_scores, rel=1e-4, abs=1e-4)


def search(model, sources, options, specials=SPECIALS, **others):
    return rectiformer.translate.search.search(model, SearchBatch(sources, options, specials, **others))


def search_static(model, sources, options, **others):
    with torch.inference_mode():
        return cuda_graphs.search_static(model, SearchBatch(sources, options, SPECIALS, **others), capture=False)


class Leaving:
    """`is_wanted` of clients who leave: source n is wanted until `leaves[n]` questions were asked."""

    def __init__(self, leaves):
        self.leaves, self.asked = leaves, 0

    def __call__(self, index):
        self.asked += 1
        return self.asked <= self.leaves.get(index, 10**9)


def steps_of(model, monkeypatch):
    """A list that grows by the number of rows at each step of the model."""
    steps, step = [], model.step
    monkeypatch.setattr(model, "step", lambda ids, state: (steps.append(len(ids)), step(ids, state))[1])
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_of_one_is_the_likeliest_path(seed):
    model = build_model(seed, eos=6.0)
    for source in random_sources(4, seed=seed):
        limit, ids = len(source) - 1 + 10, []
        while len(ids) < limit and SPECIALS.eos not in ids:
            with torch.no_grad():
                logits = model(torch.tensor([source]), None, torch.tensor([[SPECIALS.bos, *ids]]))[0, -1]
            logits[[SPECIALS.pad, SPECIALS.unk, SPECIALS.bos]] = -torch.inf
            if not ids:
                logits[SPECIALS.eos] = -torch.inf
            ids.append(int(logits.argmax()))
        ((found,),) = search(model, [source], SearchOptions(beam=1, extra_length=10, max_repeats=0))
        assert found.ended == (ids[-1] == SPECIALS.eos)
        assert found.ids == (ids[:-1] if found.ended else ids)


@pytest.mark.parametrize("beam", [1, 4])
def test_token_scores_are_those_of_the_whole_translation_read_at_once(beam):
    model, sources = build_model(eos=6.0), random_sources(8)
    for source, hypotheses in zip(sources, search(model, sources, SearchOptions(beam=beam)), strict=True):
        for h in hypotheses:
            written = [*h.ids, SPECIALS.eos][: len(h.token_scores)]
            with torch.no_grad():
                logits = model(torch.tensor([source]), None, torch.tensor([[SPECIALS.bos, *written[:-1]]]))
            scores = logits[0].log_softmax(-1).gather(1, torch.tensor(written)[:, None])
            assert h.token_scores == pytest.approx(scores.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputing_every_step_finds_the_same(variant):
    model, sources = build_model(variant=variant, decoder_layers=1), random_sources(4)
    options = SearchOptions(beam=3, nbest=3, extra_length=6)
    found = search(recomputing(model), sources, options)
    assert_same(search(model, sources, options), found)


@pytest.mark.parametrize(("beam", "order"), [(1, "post"), (4, "pre")])
def test_batches_of_any_size_find_the_same(beam, order):
    model, sources = build_model(eos=6.0, norm=order), random_sources(28)
    options = SearchOptions(beam=beam, nbest=beam, extra_length=8)
    whole = search(model, sources, options)
    assert {best[0].ended for best in whole} == {True, False}
    assert len({len(best[0].ids) for best in whole}) > 5
    for size in (1, 7):
        parts = [search(model, sources[i : i + size], options) for i in range(0, 28, size)]
        assert_same(list(chain(*parts)), whole)


def test_no_sources_no_hypotheses():
    assert search(build_model(), [], SearchOptions()) == []


def test_an_empty_sentence_is_translated_within_its_limit():
    ((found,),) = search(build_model(), [[SPECIALS.eos]], SearchOptions(extra_length=0))
    assert (len(found.ids), found.ended) == (1, False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_static_shapes_find_the_same(variant):
    """5 sentences in a shape of 8."""
    model, sources = build_model(variant=variant, decoder_layers=1, eos=6.0), random_sources(5)
    options = SearchOptions(beam=3, nbest=3, extra_length=8)
    assert_same(search_static(model, sources, options), search(model, sources, options))


@pytest.mark.parametrize(("beam", "max_repeats"), [(1, 4), (4, 0), (4, 2)])
def test_static_shapes_grow_and_shrink_without_a_trace(beam, max_repeats):
    model, sources = build_model(eos=6.0), random_sources(9, longest=40)
    options = SearchOptions(beam=beam, nbest=beam, extra_length=60, length_penalty=1.0, max_repeats=max_repeats)
    eager = search(model, sources, options)
    assert_same(search_static(model, sources, options), eager)
    shapes = {(shape.sentences, shape.capacity) for shape in cuda_graphs.CAPTURED[model].steps}
    assert {capacity for _, capacity in shapes} >= {32, 64}
    assert len({sentences for sentences, _ in shapes}) > 1
    assert {best[0].ended for best in eager} == {True, False}
    assert max(len(best[0].ids) for best in eager) > 64


def test_every_driver_counts_in_sentences():
    model, sources = build_model(eos=6.0, positions="sentence"), random_sources(9, longest=40)
    with torch.no_grad():
        model.output[SEPARATOR] = 1.05 * model.output[SPECIALS.eos]
    cached = SearchOptions(beam=4, nbest=4, extra_length=60, length_penalty=1.0)
    found = search(recomputing(model), sources, cached)
    assert_same(search(model, sources, cached), found)
    for _ in range(2):  # the second time in shapes that have been used
        assert_same(search_static(model, sources, cached), found)
    assert len({shape.capacity for shape in cuda_graphs.CAPTURED[model].steps}) > 1
    assert {h.ids.count(SEPARATOR) for best in found for h in best} >= {0, 1, 2}


@pytest.mark.parametrize("sample", [False, True])
def test_every_driver_writes_as_many_sentences_as_asked_for(sample):
    model, sources = build_model(eos=9.0, positions="sentence"), random_sources(9, longest=40)
    separator_counts = [0, 3, 1, 2, 5, 0, 1, 7, 4]
    with torch.no_grad():
        model.output[SEPARATOR] = 1.05 * model.output[SPECIALS.eos]
    options = SearchOptions(beam=4, nbest=3, extra_length=90, sample=sample)
    found = search(recomputing(model), sources, options, separator_counts=separator_counts)
    assert_same(search(model, sources, options, separator_counts=separator_counts), found)
    if not sample:
        assert_same(search_static(model, sources, options, separator_counts=separator_counts), found)
        free = search_static(model, sources, options)  # another shape, though its buffers have the same sizes
        assert_same(free, search(model, sources, options))
    for best, wanted in zip(found, separator_counts, strict=True):
        assert {h.ids.count(SEPARATOR) for h in best if h.ended} <= {wanted}
        assert all(h.ids.count(SEPARATOR) <= wanted for h in best)
    assert any(best[0].ended and wanted > 1 for best, wanted in zip(found, separator_counts, strict=True))


def test_borders_need_a_separator_and_a_number_for_each_source():
    model, options = build_model(), SearchOptions(extra_length=3)
    with pytest.raises(ArgumentError, match=r"separator_counts has 1 entries, but there are 2 sources"):
        search(model, random_sources(2), options, separator_counts=[1])
    with pytest.raises(ArgumentError, match=r"specials\.separator is None"):
        search(model, random_sources(1), options, replace(SPECIALS, separator=None), separator_counts=[1])


def test_kept_shapes_serve_later_batches_and_other_penalties():
    model = build_model(eos=6.0)
    for seed, penalty in [(0, 0.6), (1, 2.0), (2, 0.0), (0, 0.6)]:
        sources = random_sources(6, seed=seed)
        options = SearchOptions(beam=4, nbest=4, extra_length=30, length_penalty=penalty)
        assert_same(search_static(model, sources, options), search(model, sources, options))
    kept = dict(cuda_graphs.CAPTURED[model].steps)
    search_static(model, random_sources(6), SearchOptions(nbest=4, extra_length=30))
    assert dict(cuda_graphs.CAPTURED[model].steps) == kept


def test_kept_shapes_go_when_weights_move_or_the_model_dies():
    model, options = build_model(), SearchOptions(extra_length=3)
    search_static(model, random_sources(2), options)
    before = list(cuda_graphs.CAPTURED[model].steps.values())
    with torch.no_grad():
        model.output.mul_(2)  # in place: the weights stay where they are
    search_static(model, random_sources(2), options)
    assert list(cuda_graphs.CAPTURED[model].steps.values()) == before
    model.output = torch.nn.Parameter(model.output.detach().clone())
    assert_same(search_static(model, random_sources(2), options), search(model, random_sources(2), options))
    assert not set(cuda_graphs.CAPTURED[model].steps.values()) & set(before)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_kept_shapes_stay_within_their_bytes(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_BYTES", 1)
    model, sources = build_model(eos=6.0), random_sources(9, longest=40)
    options = SearchOptions(extra_length=60)
    assert_same(search_static(model, sources, options), search(model, sources, options))
    assert len(cuda_graphs.CAPTURED[model].steps) == 1


@pytest.mark.parametrize("driver", ["eager", "static", "sampled"])
def test_prefixes_come_first(driver):
    model, sources = build_model(eos=6.0), random_sources(5)
    prefixes = [[7, 8, 9], [], [SPECIALS.unk], [5] * 40, [6, SPECIALS.eos]]
    options = SearchOptions(beam=3, nbest=2, extra_length=6, sample=driver == "sampled")
    eager = search(model, sources, options, prefixes=prefixes)
    if driver == "static":
        assert_same(search_static(model, sources, options, prefixes=prefixes), eager)
    for prefix, best in zip(prefixes, eager, strict=True):
        for h in best:
            assert [*h.ids, SPECIALS.eos][: len(prefix)] == prefix
    assert {len(h.ids) for h in eager[4]} == {1}
    assert max(len(h.ids) for h in eager[3]) <= 41  # one more than the prefix, which is beyond the limit


def test_prefixes_of_an_earlier_batch_are_forgotten():
    """The long one leaves its mark in the shape that the short one grows into."""
    model, sources, options = build_model(), [[5, 6, SPECIALS.eos]], SearchOptions(extra_length=60)
    search_static(model, sources, options, prefixes=[[5] * 40])
    short = search_static(model, sources, options, prefixes=[[5]])
    assert len(short[0][0].ids) > 40
    assert_same(short, search(model, sources, options, prefixes=[[5]]))


@pytest.mark.parametrize("driver", [search, search_static])
def test_half_precision_products_cost_half_precision_digits(driver):
    model, sources = build_model(eos=6.0), random_sources(6)
    options = SearchOptions(extra_length=6)
    narrow = driver(model, sources, options, precision=torch.bfloat16)
    wide = search(model, sources, options, prefixes=[h.ids for (h,) in narrow], precision=torch.float32)
    for (one,), (other,) in zip(narrow, wide, strict=True):
        shared = list(zip(one.token_scores, other.token_scores, strict=False))[: len(one.ids)]
        errors = [abs(narrow - wide) for narrow, wide in shared]
        assert 0 < max(errors) < 16 * 2**-8 * 4  # logits below 16, rounded to 8 bits a few times


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(AssertionError, match="eval"):
        search(build_model().train(), [[SPECIALS.eos]], SearchOptions())


def test_what_cannot_be_captured_is_known():
    assert cuda_graphs.capturable(build_model())
    assert not cuda_graphs.capturable(build_model(memory="sigma-moe"))
    watched = build_model()
    next(watched.sites()).attention.observer = print
    assert not cuda_graphs.capturable(watched)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": [[3], []]}, r"sources\[1\] is empty; it must at least hold eos"),
        ({"sources": [[5, 40, 3]]}, r"sources\[0\] holds id 40, but the vocabulary has 40 entries"),
        ({"sources": [[-1, 3]]}, r"sources\[0\] holds id -1, but the vocabulary has 40 entries"),
        ({"prefixes": []}, "prefixes has 0 entries, but there are 1 sources"),
        ({"keys": [1, 2]}, "keys has 2 entries, but there are 1 sources"),
        ({"prefixes": [[77]]}, r"prefixes\[0\] holds id 77, but the vocabulary has 40 entries"),
        ({"prefixes": [[0]]}, r"prefixes\[0\] holds pad or bos, or eos before its end: \[0\]"),
        ({"prefixes": [[3, 4]]}, r"prefixes\[0\] holds pad or bos, or eos before its end: \[3, 4\]"),
    ],
)
def test_ids_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        search(build_model(), **{"sources": [[5, 3]], "options": SearchOptions(), **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam = 0, but it must be at least 1"),
        ({"nbest": 5}, "nbest = 5 is more than beam = 4; lower one or raise the other"),
        ({"nbest": 0, "sample": True}, "nbest = 0, but it must be at least 1"),
        ({"extra_length": -1}, "extra_length = -1, but it must be at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty = nan, but it must be from 0 to 5"),
        ({"temperature": 0.0, "sample": True}, "temperature = 0.0, but it must be finite and above 0"),
        ({"temperature": 0.5}, "temperature = 0.5 is about sampling; set sample as well, or leave it out"),
        ({"top_p": 1.5, "sample": True}, "top_p = 1.5, but it must be above 0 and at most 1"),
        ({"top_k": -1, "sample": True}, "top_k = -1, but it must be at least 0"),
        ({"seed": 1 << 63}, "seed = 9223372036854775808, but it must be below"),
        ({"max_repeats": -1}, "max_repeats = -1, but it is at least 1, or 0 for no limit"),
    ],
)
def test_options_that_make_no_sense_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        SearchOptions(**options)


DRIVERS = pytest.mark.parametrize("driver", [search, search_static], ids=["eager", "static"])


@DRIVERS
def test_what_nobody_wants_any_more_is_given_up_and_the_rest_goes_on(driver, monkeypatch):
    model, sources, options = build_model(), random_sources(5), SearchOptions(beam=3, extra_length=60)
    whole, steps = driver(model, sources, options, separator_counts=[20] * 5), steps_of(model, monkeypatch)
    found = driver(model, sources, options, separator_counts=[20] * 5, is_wanted=Leaving({1: 12, 2: 14, 3: 16}))
    assert found[1:4] == [[ABANDONED]] * 3
    assert_same([found[0], found[4]], [whole[0], whole[4]])
    assert steps[-1] < steps[0]


@DRIVERS
def test_a_batch_that_nobody_wants_stops_at_once(driver, monkeypatch):
    """After as many tokens as lie between two checks, of the hundreds that it would have generated."""
    model, sources, options = build_model(), random_sources(3), SearchOptions(extra_length=300)
    steps, leaving = steps_of(model, monkeypatch), Leaving({0: 9, 1: 9, 2: 9})
    assert driver(model, sources, options, separator_counts=[100] * 3, is_wanted=leaving) == [[ABANDONED]] * 3
    assert 1 <= len(steps) <= 4 * cuda_graphs.CHECK_EVERY


def test_what_nobody_wants_from_the_start_is_not_even_encoded(monkeypatch):
    model = build_model()
    monkeypatch.setattr(model, "encode", None)
    assert search(model, random_sources(2), SearchOptions(), is_wanted=lambda _: False) == [[ABANDONED]] * 2
