"""Positions that are counted in each sentence of a segment."""

import gc
import weakref

import pytest
import torch

from rectiformer import ConfigError
from rectiformer.config import ModelConfig
from rectiformer.model.embedding import sinusoids
from rectiformer.model.transformer import Transformer

START, SEPARATOR, WORDS = 2, 4, 23
SIZES = {"hidden_size": 16, "num_heads": 2, "ffn_size": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}


def build(positions="sentence"):
    torch.manual_seed(0)
    config = ModelConfig(**SIZES, positions=positions)
    return Transformer(config, WORDS, WORDS, START, (SEPARATOR, SEPARATOR)).eval()


def test_a_source_ends_each_sentence_with_its_separator():
    ids = torch.tensor([[7, 8, SEPARATOR, 9, SEPARATOR, SEPARATOR, 5], [SEPARATOR, 7, 7, 7, 7, 7, 7]])
    positions = build().source_embedding.sentence_positions(ids)
    assert positions[..., 0].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert positions[..., 1].tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_a_target_begins_each_sentence_with_its_separator_as_the_first_begins_with_the_start():
    ids = torch.tensor([[START, 8, SEPARATOR, 9, SEPARATOR, SEPARATOR, 5]])
    positions = build().target_embedding.sentence_positions(ids)
    assert positions[..., 0].tolist() == [[0, 1, 0, 1, 0, 0, 1]]
    assert positions[..., 1].tolist() == [[0, 0, 1, 1, 2, 3, 3]]


def test_steps_count_as_whole_targets_do():
    embedding = build().target_embedding
    ids = torch.tensor([[START, 8, SEPARATOR, 9, SEPARATOR, SEPARATOR, 5]])
    positions, found = torch.tensor([[-1, 0]]), []
    for id in ids[0]:
        positions = embedding.next_sentence_positions(positions, id[None])
        found.append(positions[0])
    assert torch.equal(torch.stack(found)[None], embedding.sentence_positions(ids))


def test_one_sentence_is_read_as_without():
    source, target = torch.randint(5, WORDS, (2, 9)), torch.randint(5, WORDS, (2, 7))
    target[:, 0] = START
    with torch.no_grad():
        torch.testing.assert_close(build()(source, None, target), build("sequence")(source, None, target))


def test_a_later_sentence_has_the_signals_of_the_first():
    embedding, table = build().source_embedding, sinusoids(9, 16)
    with torch.no_grad():
        embedding.table.zero_()
        found = embedding(torch.tensor([[7, SEPARATOR, 7, SEPARATOR, 7]]))[0]
    torch.testing.assert_close(found, table[[0, 1, 0, 1, 0]])


def test_sentences_are_numbered_only_where_positions_are_counted_in_them():
    ids = torch.tensor([[7, SEPARATOR, 7]])
    assert build().source_embedding.sentence_ids(ids).tolist() == [[0, 0, 1]]
    assert build("sequence").source_embedding.sentence_ids(ids) is None


def test_signals_grow_with_the_longest_sequence():
    embedding = build().source_embedding
    long = torch.full((1, 700), SEPARATOR)
    assert embedding(long).shape == (1, 700, 16)


@pytest.mark.parametrize("separators", [(None, None), (4, None)])
def test_a_vocabulary_without_separators_is_refused(separators):
    with pytest.raises(ConfigError, match=r'model\.positions = "sentence" needs a vocabulary with a separator'):
        Transformer(ModelConfig(**SIZES, positions="sentence"), WORDS, WORDS, START, separators)


def test_two_compiled_programs_take_all_shapes():
    """The first shape's, and one for all others."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    embedding = build().target_embedding
    compiled = torch.compile(embedding, backend=keep, fullgraph=True)
    for batch, length in [(25, 12), (33, 9), (16, 20), (7, 50)]:
        ids = torch.randint(3, 8, (batch, length))
        torch.testing.assert_close(compiled(ids), embedding(ids))
    assert len(graphs) == 2


@pytest.mark.parametrize("positions", ["sequence", "sentence"])
def test_tables_that_a_longer_sequence_replaces_stay_where_they_are(positions):
    """A CUDA graph reads the memory it was captured with, however long the sequences are that come after it."""
    embedding = build(positions).source_embedding
    table = weakref.ref(embedding.positions)
    embedding.reserve(len(embedding.positions) + 1)
    gc.collect()
    assert table() is not None
    assert table() is not embedding.positions
