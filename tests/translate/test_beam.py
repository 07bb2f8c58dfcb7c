"""Beam search against one written without tensors, over random language models that are tables."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rectiformer.errors import DivergedError
from rectiformer.text.documents import split_ids
from rectiformer.translate.beam import BeamState
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search_eager

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3, separator=8)
FIRST_WORD = 4


class TableDecoder:
    """A language model that looks at the last two tokens: logits[sentence, before last, last]."""

    def __init__(self, logits):
        self.logits = logits  # [B, V, V, V]
        self.sentences = torch.arange(len(logits))
        self.last = None
        self.position = 0

    def step(self, last):
        beam = len(last) // len(self.sentences)
        before = torch.full_like(last, SPECIALS.pad) if self.last is None else self.last
        self.last = last.clone()
        self.position += 1
        return self.sharpness(self.position - 1) * self.logits[self.sentences.repeat_interleave(beam), before, last]

    @staticmethod
    def sharpness(position):
        """Grows with the position: the same words in another order would otherwise tie exactly."""
        return 1 + position / 32

    def reorder(self, rows):
        self.last = self.last[rows]

    def keep(self, sentences, beam):
        self.sentences = self.sentences[sentences]
        self.last = self.last.view(-1, beam)[sentences].flatten()

    def row(self, sentence, ids):
        """Log probabilities of what follows `ids`."""
        before, last = [SPECIALS.pad, SPECIALS.bos, *ids][-2:]
        return (self.sharpness(len(ids)) * self.logits[sentence, before, last]).log_softmax(-1).numpy()


def random_logits(seed, sentences=1, vocabulary=9, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sentences, vocabulary, vocabulary, vocabulary, generator=generator)


class TableModel:
    """What decoding asks of a model, answered by a `TableDecoder`, whose sources say nothing."""

    def __init__(self, logits):
        self.logits, self.output = logits, torch.zeros(logits.shape[-1], 1)

    def encode(self, ids, lengths):
        return None

    def begin(self, context):
        return TableDecoder(self.logits)

    def step(self, last, state):
        return state.step(last)


def batch_of(limits, prefixes=None, counts=None, **options):
    """A batch whose translations have at most so many tokens."""
    sources = [[SPECIALS.eos] * (limit + 1) for limit in limits]
    return SearchBatch(
        sources, SearchOptions(extra_length=0, **options), SPECIALS, prefixes=prefixes, separator_counts=counts
    )


def found(logits, limits, prefixes=None, counts=None, **options):
    return search_eager(TableModel(logits), batch_of(limits, prefixes, counts, **options))


def penalty(length, alpha):
    return np.float32(((5 + length) / 6) ** alpha)


def repeats_too_often(ids, most):
    for n in range(1, 9):
        block = ids[-n:]
        if most and len(ids) >= n * (most + 1) and ids[-n * (most + 1) :] == block * (most + 1):
            return True
    return False


def plain_allowed(ids, prefix, vocabulary, most, counts=None):
    if len(ids) < len(prefix):
        return [prefix[len(ids)]]
    tokens = [SPECIALS.eos] if ids else []
    tokens += [x for x in range(FIRST_WORD, vocabulary) if not repeats_too_often([*ids, x], most)]
    if counts is not None:
        written = ids.count(SPECIALS.separator)
        barred = SPECIALS.eos if written < counts else SPECIALS.separator
        tokens = [x for x in tokens if x != barred]
        if ids[-1:] in ([], [SPECIALS.separator]):
            tokens = [x for x in tokens if x not in (SPECIALS.eos, SPECIALS.separator)]
    return tokens


def plain_beam_search(row, vocabulary, limit, beam, alpha, nbest, most, prefix, counts):
    """(ended, score, ids, log probability, token scores) of the best hypotheses, in lists and float32 numbers."""
    alive, finished = [([], np.float32(0), [])], []
    for length in range(1, limit + 1):
        candidates = []
        for ids, total, scores in alive:
            log_probs = row(ids)
            for token in plain_allowed(ids, prefix, vocabulary, most, counts):
                candidates.append(([*ids, token], total + log_probs[token], [*scores, log_probs[token]]))
        candidates.sort(key=lambda candidate: -candidate[1])
        candidates = candidates[: 2 * beam if beam > 1 else 1]
        for ids, total, scores in candidates:
            if ids[-1] == SPECIALS.eos:
                finished.append((True, total / penalty(length, alpha), ids[:-1], total, scores))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[1])[:beam]
        alive = [candidate for candidate in candidates if candidate[0][-1] != SPECIALS.eos][:beam]
        if not alive or (len(finished) >= nbest and finished[nbest - 1][1] >= alive[0][1] / penalty(limit, alpha)):
            break
    unended = [(False, total / penalty(limit, alpha), ids, total, scores) for ids, total, scores in alive]
    return [*finished, *unended][:nbest]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    limit=st.integers(4, 14),
    most=st.integers(0, 3),
    prefix=st.lists(st.integers(FIRST_WORD, 8), max_size=3),
    scale=st.sampled_from([0.5, 2.0, 4.0]),
    most_separators=st.none() | st.integers(0, 3),
)
def test_a_search_in_plain_python_finds_the_same(seed, beam, alpha, limit, most, prefix, scale, most_separators):
    logits = random_logits(seed, sentences=3, scale=scale)
    prefixes = [prefix, [], prefix[:1]]
    limits = [limit, limit + 3, limit]
    counts = [None] * 3 if most_separators is None else [most_separators, most_separators // 2, 0]
    nbest = 1 + seed % beam
    asked = {"beam": beam, "nbest": nbest, "length_penalty": alpha, "max_repeats": most}
    ours = found(logits, limits, prefixes, None if most_separators is None else counts, **asked)
    for sentence, hypotheses in enumerate(ours):
        theirs = plain_beam_search(
            lambda ids, sentence=sentence: TableDecoder(logits).row(sentence, ids),
            logits.shape[-1], limits[sentence], beam, alpha, nbest, most, prefixes[sentence], counts[sentence],
        )  # fmt: skip
        assert [h.ids for h in hypotheses] == [ids for _, _, ids, _, _ in theirs]
        assert [h.ended for h in hypotheses] == [ended for ended, *_ in theirs]
        assert [h.token_scores for h in hypotheses] == [scores for *_, scores in theirs]
        assert [h.log_probability for h in hypotheses] == [total for *_, total, _ in theirs]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score, *_ in theirs], rel=2**-23)


@pytest.mark.parametrize("seed", range(20))
def test_asking_for_one_finds_the_first_of_many(seed):
    """It stops earlier, as soon as nothing alive can still be better."""
    logits, limits = random_logits(seed, sentences=5, scale=2.0), [8, 20, 12, 5, 30]
    many = found(logits, limits, beam=4, nbest=4)
    assert found(logits, limits, beam=4, nbest=1) == [hypotheses[:1] for hypotheses in many]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_all_there_is_finds_the_best_there_is(seed, alpha):
    vocabulary, limit = FIRST_WORD + 3, 5
    logits = random_logits(seed, vocabulary=vocabulary)
    decoder = TableDecoder(logits)
    everything = []
    for length in range(1, limit):
        for ids in itertools.product(range(FIRST_WORD, vocabulary), repeat=length):
            total = sum(float(decoder.row(0, ids[:at])[token]) for at, token in enumerate([*ids, SPECIALS.eos]))
            everything.append((total / ((6 + length) / 6) ** alpha, list(ids)))
    everything.sort(key=lambda hypothesis: -hypothesis[0])
    (ours,) = found(logits, [limit], beam=len(everything), nbest=20, length_penalty=alpha, max_repeats=0)
    assert [h.ids for h in ours] == [ids for _, ids in everything[:20]]
    assert [h.score for h in ours] == pytest.approx([score for score, _ in everything[:20]], rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(20))
def test_a_beam_of_one_takes_the_likeliest_token_until_eos(seed, alpha):
    logits = random_logits(seed)
    ids, limit = [], 12
    while len(ids) < limit and SPECIALS.eos not in ids:
        row = TableDecoder(logits).row(0, ids)
        ids.append(max(plain_allowed(ids, [], len(row), 0), key=lambda token: row[token]))
    ((ours,),) = found(logits, [limit], beam=1, length_penalty=alpha, max_repeats=0)
    assert ours.ended == (ids[-1] == SPECIALS.eos)
    assert ours.ids == (ids[:-1] if ours.ended else ids)


@pytest.mark.parametrize("beam", [1, 4])
def test_sentences_do_not_see_their_neighbors_come_and_go(beam):
    logits = random_logits(0, sentences=30)
    limits = [3 + index % 11 for index in range(30)]
    together = found(logits, limits, beam=beam, nbest=beam)
    assert len({len(hypotheses[0].ids) for hypotheses in together}) > 3
    assert together == [found(logits[i : i + 1], limits[i : i + 1], beam=beam, nbest=beam)[0] for i in range(30)]


def test_hypotheses_are_sorted_distinct_and_add_up():
    for hypotheses in found(random_logits(1, sentences=20), [9] * 20, beam=5, nbest=5):
        assert len({tuple(h.ids) for h in hypotheses}) == 5
        assert hypotheses == sorted(hypotheses, key=lambda h: (not h.ended, -h.score))
        for h in hypotheses:
            assert len(h.token_scores) == len(h.ids) + h.ended
            assert sum(h.token_scores) == pytest.approx(h.log_probability, rel=1e-6)
            assert h.score == pytest.approx(h.log_probability / penalty(len(h.token_scores), 0.6), rel=1e-6)


@pytest.mark.parametrize("beam", [1, 4])
def test_as_many_sentences_are_written_as_asked_for_and_none_is_empty(beam):
    """However much likelier an end is than to go on: beam search by itself would end at once."""
    logits = random_logits(3, sentences=6)
    logits[..., SPECIALS.eos] += 6
    logits[..., SPECIALS.separator] += 3
    assert any(h.ids.count(SPECIALS.separator) == 0 for (h,) in found(logits, [40] * 6, beam=beam))
    for number, (best,) in enumerate(found(logits, [40] * 6, counts=list(range(6)), beam=beam)):
        parts = split_ids(best.ids, SPECIALS.separator)
        assert best.ended
        assert len(parts) == number + 1
        assert all(parts)


@pytest.mark.parametrize("beam", [1, 3])
def test_eos_never_comes_first_and_other_specials_never(beam):
    logits = random_logits(2, sentences=10)
    logits[..., : SPECIALS.eos + 1] += 20
    for hypotheses in found(logits, [6] * 10, beam=beam, nbest=beam):
        for h in hypotheses:
            assert h.ids
            assert min(h.ids) >= FIRST_WORD


@pytest.mark.parametrize("beam", [1, 3])
def test_at_the_length_limit_hypotheses_are_taken_as_they_are(beam):
    logits = random_logits(3, sentences=4)
    logits[..., SPECIALS.eos] = -1e4
    limits = [1, 2, 5, 9]
    for limit, hypotheses in zip(limits, found(logits, limits, beam=beam, nbest=beam), strict=True):
        assert [h.ended for h in hypotheses] == [False] * beam
        assert [len(h.ids) for h in hypotheses] == [len(h.token_scores) for h in hypotheses] == [limit] * beam


@pytest.mark.parametrize("prefix", [[5], [8, 8, 4], [SPECIALS.unk, 6], [7, 7, 7, 7, 7, 7]])
def test_forced_tokens_come_first_whatever_they_cost(prefix):
    logits = random_logits(4, sentences=2)
    forced, free = found(logits, [20, 20], [prefix, []], beam=3, nbest=3)
    decoder = TableDecoder(logits)
    for h in forced:
        assert h.ids[: len(prefix)] == prefix
        costs = [decoder.row(0, prefix[:at])[token] for at, token in enumerate(prefix)]
        assert h.token_scores[: len(prefix)] == costs
    assert free == found(logits[1:], [20], beam=3, nbest=3)[0]


@pytest.mark.parametrize("prefix", [[SPECIALS.eos], [4, 5, SPECIALS.eos]])
def test_a_forced_end_ends(prefix):
    (hypotheses,) = found(random_logits(5), [20], [prefix], beam=3, nbest=3)
    assert [(h.ids, h.ended) for h in hypotheses] == [(prefix[:-1], True)]


def looping_logits(words, vocabulary):
    """A model that, after each of some words, is all but sure of the next, round and round."""
    logits = torch.zeros(1, vocabulary, vocabulary, vocabulary)
    for word, following in zip(words, [*words[1:], words[0]], strict=True):
        logits[:, :, word, following] = 20
    logits[:, :, SPECIALS.bos, words[0]] = 20
    logits[..., SPECIALS.eos] = -40
    return logits


def longest_repetition(ids, n):
    """Most occurrences of a block of n tokens, one right after the other."""
    most = 1
    for start in range(len(ids)):
        block, times = ids[start : start + n], 1
        while len(block) == n and ids[start + times * n : start + (times + 1) * n] == block:
            times += 1
        most = max(most, times)
    return most


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_model_in_a_loop_is_stopped(beam, n, most):
    words = list(range(FIRST_WORD, FIRST_WORD + n))
    logits = looping_logits(words, vocabulary=16)
    ((runaway,),) = found(logits, [60], beam=beam, max_repeats=0)
    assert runaway.ids == (words * 60)[:60]
    ((guarded,),) = found(logits, [60], beam=beam, max_repeats=most)
    assert guarded.ids[: n * most] == words * most
    assert max(longest_repetition(guarded.ids, length) for length in range(1, 9)) == most


def test_a_block_longer_than_eight_may_repeat():
    words = list(range(FIRST_WORD, FIRST_WORD + 9))
    ((free,),) = found(looping_logits(words, vocabulary=16), [60], beam=4, max_repeats=1)
    assert free.ids == (words * 60)[:60]


def test_text_that_does_not_loop_is_left_alone():
    logits = random_logits(6, sentences=40, vocabulary=30, scale=3.0)
    unguarded = found(logits, [12] * 40, beam=4, max_repeats=0)
    calm = [max(longest_repetition(h[0].ids, n) for n in range(1, 9)) <= 4 for h in unguarded]
    assert sum(calm) > 30
    guarded = found(logits, [12] * 40, beam=4, max_repeats=4)
    assert [h for h, is_calm in zip(guarded, calm, strict=True) if is_calm] == [
        h for h, is_calm in zip(unguarded, calm, strict=True) if is_calm
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("beam", [1, 4])
def test_logits_that_are_not_numbers_are_an_error(beam, bad):
    logits = random_logits(7)
    logits[:, :, SPECIALS.bos] = bad
    with pytest.raises(DivergedError, match="scores are not finite numbers"):
        found(logits, [6], beam=beam)


@pytest.mark.parametrize(("sentences", "capacity"), [([0, 1, 2], 12), ([2, 0], 24)])
def test_a_state_moved_elsewhere_goes_on_as_if_it_had_not(sentences, capacity):
    """Growing the capacity, dropping and permuting sentences half way, as the captured driver does."""
    logits, limits, prefixes = random_logits(8, sentences=3), [12, 9, 12], [[5, 5, 5, 6], [], [4]]
    options, cpu = {"beam": 3, "nbest": 3, "max_repeats": 2}, torch.device("cpu")
    state = BeamState(batch_of(limits, prefixes, **options), logits.shape[-1], cpu)
    decoder = TableDecoder(logits)
    for _ in range(3):
        decoder.reorder(state.advance(decoder.step(state.last.flatten())))
    empty = batch_of([], [], **options, length_penalty=3.0)
    larger = BeamState(empty, logits.shape[-1], cpu, size=8, capacity=capacity)
    larger.copy_from(state, torch.tensor(sentences))
    decoder.keep(torch.tensor(sentences), 3)
    decoder.logits = torch.cat([logits, logits.new_zeros(5, *logits.shape[1:])])
    decoder.sentences = torch.tensor(sentences + [3] * (8 - len(sentences)))
    decoder.last = torch.cat([decoder.last, decoder.last.new_full((3 * (8 - len(sentences)),), SPECIALS.bos)])
    while not larger.done.all():
        decoder.reorder(larger.advance(decoder.step(larger.last.flatten())))
    whole = found(logits, limits, prefixes, **options)
    assert larger.hypotheses(range(len(sentences))) == [whole[index] for index in sentences]
