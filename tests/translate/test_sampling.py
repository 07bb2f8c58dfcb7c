"""Samples: the right frequencies, the same for a sentence in any batch."""

import math

import pytest
import torch

import rectiformer.translate.search
from rectiformer.config import ModelConfig
from rectiformer.model.transformer import Transformer
from rectiformer.translate.beam import filter_logits, gumbel
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3)
VOCABULARY = 20


def build_model(seed=0, scale=2.0):
    torch.manual_seed(seed)
    config = ModelConfig(
        hidden_size=32, num_heads=2, ffn_size=64, encoder_layers=1, decoder_layers=1, tie_embeddings="none"
    )
    model = Transformer(config, VOCABULARY, VOCABULARY, SPECIALS.bos).eval()
    with torch.no_grad():
        model.output.mul_(scale)
    return model


def random_sources(count):
    generator = torch.Generator().manual_seed(count)
    lengths = [1 + index % 7 for index in range(count)]
    return [[*torch.randint(4, VOCABULARY, (n,), generator=generator).tolist(), SPECIALS.eos] for n in lengths]


def search(model, sources, options, **others):
    return rectiformer.translate.search.search(model, SearchBatch(sources, options, SPECIALS, **others))


def assert_drawn_from(counts, probabilities):
    """Pearson's statistic has mean d and variance near 2 d over d = cells - 1; 6 deviations are out by chance never."""
    assert sum(counts) >= 5 / min(p for p in probabilities if p), "too few draws for the rarest cell"
    assert not any(count for count, p in zip(counts, probabilities, strict=True) if not p)
    expected = [(count, sum(counts) * p) for count, p in zip(counts, probabilities, strict=True) if p]
    freedom = len(expected) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in expected)
    assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"seed": 77}], ids=str
)
def test_tokens_are_drawn_as_often_as_the_model_says(options):
    """The first token of 8 samples for 500 keys, against the softmax of what is allowed."""
    model, source = build_model(scale=1.0), [5, 6, 7, SPECIALS.eos]
    choice = SearchOptions(sample=True, nbest=8, extra_length=0, max_repeats=0, **options)
    found = search(model, [source] * 500, choice, keys=range(500))
    with torch.no_grad():
        logits = model(torch.tensor([source]), None, torch.tensor([[SPECIALS.bos]]))[0, 0]
    logits[: SPECIALS.eos + 1] = -torch.inf  # at the first position eos is out, too
    allowed = filter_logits(logits.log_softmax(-1)[None], choice)[0].softmax(-1).tolist()
    firsts = [h.ids[0] for samples in found for h in samples]
    assert_drawn_from([firsts.count(token) for token in range(VOCABULARY)], allowed)


@pytest.mark.parametrize("size", [1, 7])
def test_samples_do_not_depend_on_the_batch(size):
    model, sources = build_model(scale=4.0), random_sources(28)
    options = SearchOptions(sample=True, nbest=3, extra_length=8, temperature=0.8, top_p=0.95)
    whole = search(model, sources, options)
    parts = []
    for start in range(0, 28, size):
        batch = range(start, start + size)
        parts += search(model, [sources[index] for index in batch], options, keys=batch)
    assert [[h.ids for h in best] for best in parts] == [[h.ids for h in best] for best in whole]
    assert len({len(h.ids) for best in whole for h in best}) > 3


def test_more_samples_begin_with_the_same_ones():
    model, sources = build_model(), random_sources(5)
    few, many = (search(model, sources, SearchOptions(sample=True, nbest=count)) for count in (2, 5))
    for some, more in zip(few, many, strict=True):
        assert {tuple(h.ids) for h in some} <= {tuple(h.ids) for h in more}


def test_seed_key_and_sample_each_change_what_is_drawn():
    model, sources = build_model(), [[5, 6, SPECIALS.eos]] * 2

    def draw(seed, keys):
        options = SearchOptions(sample=True, nbest=2, seed=seed)
        return [{tuple(h.ids) for h in best} for best in search(model, sources, options, keys=keys)]

    first, second = draw(1, [0, 1])
    assert len(first) == len(second) == 2
    assert not first & second
    assert not first & draw(2, [0, 1])[0]
    assert draw(1, [1, 0]) == [second, first]


def test_scores_are_those_of_the_model_whatever_narrowed_the_choice():
    model, sources = build_model(), random_sources(6)
    options = SearchOptions(sample=True, nbest=2, temperature=3.0, top_k=4)
    for source, samples in zip(sources, search(model, sources, options), strict=True):
        assert samples == sorted(samples, key=lambda h: (not h.ended, -h.score))
        for h in samples:
            written = [*h.ids, SPECIALS.eos][: len(h.token_scores)]
            with torch.no_grad():
                logits = model(torch.tensor([source]), None, torch.tensor([[SPECIALS.bos, *written[:-1]]]))
            scores = logits[0].log_softmax(-1).gather(1, torch.tensor(written)[:, None])
            assert h.token_scores == pytest.approx(scores.flatten().tolist(), abs=1e-4)
            assert h.log_probability == pytest.approx(sum(h.token_scores), rel=1e-5)
            assert h.score == pytest.approx(h.log_probability / options.penalty(len(written)), rel=1e-5)


def test_one_candidate_left_is_the_greedy_path():
    model, sources = build_model(scale=4.0), random_sources(6)
    greedy = search(model, sources, SearchOptions(beam=1))
    for narrowed in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}):
        sampled = search(model, sources, SearchOptions(sample=True, **narrowed))
        assert [h.ids for (h,) in sampled] == [h.ids for (h,) in greedy]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"top_k": 2}, 2), ({"top_k": 9}, 4), ({"top_p": 0.39}, 1), ({"top_p": 0.41}, 2), ({"top_p": 0.95}, 4)],
    ids=str,
)
def test_the_likeliest_tokens_are_kept_until_they_hold_enough(options, kept):
    log_probs = torch.tensor([0.1, 0.4, 0.2, 0.3]).double().log()[None]
    weights = filter_logits(log_probs, SearchOptions(sample=True, **options))
    assert weights.isfinite()[0].tolist() == [rank < kept for rank in (3, 0, 2, 1)]


def test_noise_has_the_distribution_of_gumbel():
    """Its empirical distribution over 2e5 cells stays within Kolmogorov's bound at 1e-6 of exp(-exp(-x))."""
    noise = gumbel(3, torch.arange(10), 20, torch.tensor([4]), 1000).flatten().sort().values
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    distance = ((-(-noise).exp()).exp() - steps).abs().max()
    assert distance < math.sqrt(math.log(2 / 1e-6) / (2 * len(noise)))


def test_noise_of_neighbors_is_unrelated():
    """Correlations over 1e5 cells between neighboring seeds, keys, samples and positions: 5 deviations allowed."""

    def noise(seed=1, key=0, position=0):
        return gumbel(seed, torch.tensor([key, key + 1]), 2, torch.tensor([position]), 100_000)[0]

    base = noise()
    others = [base[1], noise(seed=2)[0], noise(key=1)[0], noise(position=1)[0], noise(seed=0, position=1)[0]]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base[0], other]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(100_000)
