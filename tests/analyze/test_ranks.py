"""What the meters of several ranks have seen adds up to what one rank's would have.

tests/translate/test_ranks.py has `analyze` on real ranks.
"""

import json
from contextlib import ExitStack

import pytest
import torch
from analyze.test_findings import PAIRS, all_observers, build_translator

from rectiformer.analyze.meters import DistanceMeter, length_edges
from rectiformer.analyze.survey import HeadObserver, add_over_ranks, forced_batches, weighing_sites
from rectiformer.distributed.ranks import SINGLE_PROCESS
from rectiformer.translate.evaluate import EncodedPairs, decode_forced


def run(translator, observers, pairs):
    for batch in forced_batches(translator, pairs):
        with translator.inference(), ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer.observe(batch))
            decode_forced(translator, batch)


def head_observers(model, _):
    return [HeadObserver(site) for site in weighing_sites(model) if site.kind == "cross"]


@pytest.mark.parametrize("build", [all_observers, head_observers])
def test_states_of_every_meter_add_up(build):
    """Through JSON, as ranks exchange them; a rank that saw nothing adds nothing."""
    translator = build_translator("reluformer")
    edges = length_edges(EncodedPairs(translator, PAIRS).source_lengths + 1)
    whole, first, second, idle = (build(translator.model, edges) for _ in range(4))
    for observers, pairs in ((whole, PAIRS), (first, PAIRS[:7]), (second, PAIRS[7:])):
        run(translator, observers, pairs)
    whole, first, second, idle = (
        [meter for observer in observers for meter in observer.meters] for observers in (whole, first, second, idle)
    )
    for other in (second, idle):
        for meter, its in zip(first, other, strict=True):
            meter.merge(json.loads(json.dumps(its.state())))
    for meter, expected in zip(first, whole, strict=True):
        torch.testing.assert_close(flat(meter.state()), flat(expected.state()))
    assert len(whole) >= 2


def test_states_of_distances_add_up():
    meters = [DistanceMeter() for _ in range(3)]
    torch.manual_seed(0)
    weights, queries, keys = torch.rand(4, 2, 3, 5), torch.randint(-1, 3, (4, 3)), torch.randint(-1, 3, (4, 5))
    for meter, rows in zip(meters, (slice(None), slice(0, 1), slice(1, 4)), strict=True):
        meter.update(weights[rows], queries[rows], keys[rows])
    meters[1].merge(json.loads(json.dumps(meters[2].state())))
    torch.testing.assert_close(flat(meters[1].state()), flat(meters[0].state()))


def test_one_rank_is_left_as_it_is():
    meter = DistanceMeter()
    meter.update(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
    before = meter.state()
    add_over_ranks(SINGLE_PROCESS, [meter])
    assert meter.state() == before


def flat(state):
    """All values of a nested list."""
    if isinstance(state, list | tuple):
        return torch.cat([flat(each) for each in state])
    return torch.tensor([float(state)], dtype=torch.float64)
