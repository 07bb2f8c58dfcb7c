"""The encoder-decoder: sizes and formulas of the papers, and what must not matter to it."""

import copy
import math

import pytest
import torch
from torch import nn

from rectiformer import VARIANTS, RectifiedAttention
from rectiformer.config import ModelConfig
from rectiformer.errors import ConfigError
from rectiformer.model.embedding import sinusoids
from rectiformer.model.layers import EPSILON
from rectiformer.model.memory import MEMORIES
from rectiformer.model.transformer import Encoded, Transformer

START, WORDS = 2, 23
BASE = {"hidden_size": 512, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 6, "ffn_size": 2048}


def build(source_size=WORDS, target_size=WORDS, random=True, dtype=torch.float64, **settings):
    """A small model in evaluation mode; `random` makes every parameter matter, biases and norms too."""
    config = ModelConfig(**{"hidden_size": 16, "num_heads": 2, "ffn_size": 16, **settings})
    model = Transformer(config, source_size, target_size, START).to(dtype).eval()
    if random:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def draw_ids(rows, length, words=WORDS):
    return torch.randint(3, words, (rows, length))


def draw_targets(rows, length):
    return torch.cat([torch.full((rows, 1), START), draw_ids(rows, length - 1)], 1)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def count_base(variant):
    """Parameters of the papers' base model without the rows of its embeddings, and without output norms."""
    model = Transformer(ModelConfig(**BASE, variant=variant, tie_embeddings="target"), 100, 100)
    norms = count(parameter for site in model.sites() for parameter in site.attention.norm.parameters())
    return count(model.parameters()) - 2 * 100 * 512 - norms, norms


@pytest.mark.parametrize(("variant", "extra"), [("softmax", 0), ("rela-i", 18 * 512), ("rela-g", 18 * 2 * 512)])
def test_the_base_model_has_the_parameters_of_the_papers(variant, extra):
    attention, memory, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 512
    layers = 6 * (attention + memory + 2 * norm) + 6 * (2 * attention + memory + 3 * norm)
    body, norms = count_base(variant)
    assert body == layers + 2 * 512  # a bias of each embedding
    assert norms == extra


def layer_norm(x, norm):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + EPSILON).sqrt() * norm.weight + norm.bias


def softmax_attention(module, x, context, hidden):
    heads = (1, x.shape[1], module.num_heads, -1), (1, context.shape[1], module.num_heads, -1)
    matrices, biases = module.input_weight.chunk(3), module.input_bias.chunk(3)
    q, k, v = (
        (given @ matrix.T + bias).view(shape).transpose(1, 2)
        for given, matrix, bias, shape in zip(
            (x, context, context), matrices, biases, (heads[0], heads[1], heads[1]), strict=True
        )
    )
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ module.output.weight.T + module.output.bias


def relu_memory(module, x):
    lookup = module.lookup
    return (x @ lookup.keys.T + lookup.key_bias).relu() @ module.values + module.value_bias


@pytest.mark.parametrize("order", ["post", "pre"])
def test_one_layer_of_each_kind_by_hand(order):
    model = build(variant="softmax", norm=order, encoder_layers=1, decoder_layers=1)
    source, target = draw_ids(1, 7), draw_targets(1, 5)

    def around(residual, x, sublayer):
        if order == "post":
            return layer_norm(x + sublayer(x), residual.norm)
        return x + sublayer(layer_norm(x, residual.norm))

    seen, future = torch.zeros(7, 7, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).triu(1)
    layer, x = model.encoder[0], model.source_embedding(source)
    x = around(layer.around_attention, x, lambda x: softmax_attention(layer.attention, x, x, seen))
    x = encoded = around(layer.around_memory, x, lambda x: relu_memory(layer.memory, x))
    if order == "pre":
        encoded = layer_norm(x, model.encoder_norm)
    layer, x = model.decoder[0], model.target_embedding(target)
    x = around(layer.around_attention, x, lambda x: softmax_attention(layer.attention, x, x, future))
    x = around(layer.around_cross, x, lambda x: softmax_attention(layer.cross, x, encoded, seen[:5]))
    x = around(layer.around_memory, x, lambda x: relu_memory(layer.memory, x))
    if order == "pre":
        x = layer_norm(x, model.decoder_norm)
    torch.testing.assert_close(model(source, None, target), x @ model.output.T)


@pytest.mark.parametrize("width", [2, 7, 16])
def test_positions_are_sines_then_cosines_of_times_from_1_to_10000(width):
    half = width // 2
    table = sinusoids(3000, width)
    for position in (0, 1, 511, 2999):
        angles = [position / 10_000 ** (index / max(1, half - 1)) for index in range(half)]
        formula = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles] + [0.0] * (width % 2)
        torch.testing.assert_close(table[position], torch.tensor(formula), rtol=0, atol=2**-24)


def test_embeddings_are_scaled_rows_with_bias_and_position():
    embedding, ids = build().source_embedding, draw_ids(2, 9)
    by_hand = embedding.table[ids] * math.sqrt(16) + embedding.bias + sinusoids(9, 16)
    torch.testing.assert_close(embedding(ids), by_hand)


def test_the_start_reads_as_a_zero_vector():
    model = build(tie_embeddings="none")
    first = model.target_embedding(draw_targets(1, 4))[0, 0]
    assert torch.equal(first, model.target_embedding.positions[0])
    first.sum().backward()
    assert not model.target_embedding.table.grad.any()
    assert model.source_embedding(torch.tensor([[START]])).ne(first).any()  # it is a word like any other there


@pytest.mark.parametrize(
    ("tie", "tables"), [("all", WORDS), ("target", 2 * WORDS), ("none", 3 * WORDS)], ids=lambda value: str(value)
)
def test_ties_share_one_matrix(tie, tables):
    model = build(tie_embeddings=tie)
    for state in (model, copy.deepcopy(model), copy.deepcopy(model).float()):
        matrices = state.source_embedding.table, state.target_embedding.table, state.output
        assert len({matrix.data_ptr() for matrix in matrices}) == tables // WORDS
        assert count({id(matrix): matrix for matrix in matrices}.values()) == tables * 16
    saved = model.state_dict()
    other = build(tie_embeddings=tie)
    other.load_state_dict(saved)
    ids = draw_ids(2, 5), None, draw_targets(2, 5)
    assert torch.equal(other(*ids), model(*ids))
    assert not any("positions" in name for name in saved)


def test_one_table_needs_one_vocabulary():
    with pytest.raises(
        ConfigError, match=r"source has 20 entries and the target 30; use model.tie_embeddings = \"target\""
    ):
        build(20, 30, tie_embeddings="all")
    assert build(20, 30, tie_embeddings="target")(draw_ids(1, 3, 20), None, draw_targets(1, 3)).shape == (1, 3, 30)


def within(tensor, limit):
    """Whether uniform numbers fill [-limit, limit]: none beyond it, and the largest of thousands near it."""
    return 0.99 * limit < tensor.abs().max() <= limit


def test_initial_parameters_are_those_of_the_authors():
    model = build(3000, 3000, random=False, hidden_size=64, ffn_size=256, variant="rela-g", tie_embeddings="none")
    for table in (model.source_embedding.table, model.target_embedding.table):
        entries = table.numel()
        assert abs(table.std() - 64**-0.5) < 5 * 64**-0.5 / math.sqrt(2 * entries)  # five standard errors
        assert abs(table.mean()) < 5 * 64**-0.5 / math.sqrt(entries)
    assert within(model.output, math.sqrt(6 / (3000 + 64)))
    layer = model.decoder[0]
    assert within(layer.attention.input_weight, math.sqrt(6 / (64 + 3 * 64)))
    assert within(layer.cross.input_weight, math.sqrt(6 / (64 + 64)))
    assert within(layer.cross.output.weight, math.sqrt(6 / (64 + 64)))
    assert within(layer.memory.values, math.sqrt(6 / (64 + 256)))
    assert within(layer.memory.lookup.keys, math.sqrt(6 / (64 + 256)))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "_bias")):
            assert not parameter.any(), name
        if name.endswith(("norm.weight", "norm.gain")):
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_changes_nothing(variant):
    low = {"beta_init": 0.25} if variant == "threshold-diff" else {}  # cosines of four numbers stay below 2
    model, source, lengths = build(variant=variant, **low), draw_ids(2, 12), torch.tensor([12, 9])
    target = draw_targets(2, 10)
    plain = model(source, lengths, target)
    columns = torch.cat([source, draw_ids(2, 5)], 1)
    rows = torch.cat([columns, draw_ids(1, 17)])
    torch.testing.assert_close(model(columns, lengths, target), plain)
    filled = model(rows, torch.tensor([12, 9, 0]), torch.cat([target, draw_targets(1, 10)]))
    torch.testing.assert_close(filled[:2], plain)
    assert filled.isfinite().all()
    assert torch.equal(model(source[:1], None, target[:1]), model(source[:1], lengths[:1], target[:1]))
    assert not torch.allclose(model(source, None, target)[1], plain[1])  # a word more does matter


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_words_of_the_target_do_not_matter(variant):
    model, source, target = build(variant=variant), draw_ids(2, 12), draw_targets(2, 12)
    other = target.clone()
    other[:, 7:] = (target[:, 7:] - 2) % (WORDS - 3) + 3
    before, after = model(source, None, target), model(source, None, other)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert (after[:, 7:] - before[:, 7:]).abs().amax(-1).min() > 1e-3


def test_each_site_has_its_variant():
    model = build(variant="rela-g", encoder_variant="softmax", cross_variant="reluformer")
    assert [(site.kind, site.layer, site.attention.variant) for site in model.sites()] == [
        ("encoder", 0, "softmax"),
        ("encoder", 1, "softmax"),
        ("decoder", 0, "rela-g"),
        ("cross", 0, "reluformer"),
        ("decoder", 1, "rela-g"),
        ("cross", 1, "reluformer"),
    ]
    assert all(site.attention.cross == (site.kind == "cross") for site in model.sites())
    assert len(list(model.sites())) == sum(isinstance(module, RectifiedAttention) for module in model.modules())


@pytest.mark.parametrize(("learn", "numbers"), [("model", 2), ("layer", 6), ("head", 12), ("fixed", 0)])
def test_learned_numbers_are_held_as_told(learn, numbers):
    """reluformer at two sites and entmax at one, two layers of two heads each."""
    shared = {"gamma_sharing": learn, "alpha_sharing": learn, "beta_sharing": learn}
    model = build(variant="reluformer", encoder_variant="entmax", random=False, **shared)
    found = {name: parameter for name, parameter in model.named_parameters() if "learned" in name}
    assert count(found.values()) == numbers
    model(draw_ids(2, 6), None, draw_targets(2, 5)).square().sum().backward()
    assert all(parameter.grad.ne(0).any() for parameter in found.values())


@pytest.mark.parametrize("memory", MEMORIES)
def test_memories_are_those_of_the_configuration(memory):
    model = build(memory=memory, ffn_size=16, encoder_layers=1, ffn_dropout=0.25)
    memories = list(model.memories())
    assert [each.memory.name for each in memories] == [memory] * 3
    assert memories[0] is model.encoder[0].memory
    assert all(each.slots == 16 and each.lookup.drop.probability == 0.25 for each in memories)
    if memory == "sigma-moe":
        assert {each.lookup.layers for each in memories} == {3}
    assert model(draw_ids(2, 6), None, draw_targets(2, 5)).isfinite().all()


def test_longer_positions_made_while_translating_serve_training():
    model = build(hidden_size=8, num_heads=1, encoder_layers=1, decoder_layers=1, dtype=torch.float32)
    source, target = draw_ids(1, 530), draw_targets(1, 520)
    with torch.inference_mode():
        model.encode(source, None)
        model.decode(target, Encoded(torch.randn(1, 3, 8)))
    assert torch.equal(model.source_embedding.positions[:512], sinusoids(512, 8))
    assert torch.equal(model.target_embedding.positions[:520], sinusoids(520, 8))
    assert not model.source_embedding.positions.is_inference()
    model.train()(source, None, target).sum().backward()
    assert model.source_embedding.bias.grad.ne(0).any()


def test_the_meta_device_gives_shapes():
    with torch.device("meta"):
        model = build(random=False)
        logits = model(draw_ids(2, 5), torch.tensor([5, 3]), draw_targets(2, 4))
    assert (logits.shape, logits.device.type) == ((2, 4, WORDS), "meta")


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("variant", ["softmax", "rela-g", "reluformer"])
def test_bfloat16_products_err_no_more_than_a_model_of_bfloat16(variant, order):
    """Twice is allowed, as for every fast path; norms, positions and weights in float32 make it less."""
    exact = build(variant=variant, norm=order, hidden_size=64, dtype=torch.float64)
    ids = draw_ids(4, 12), torch.tensor([12, 9, 7, 1]), draw_targets(4, 12)
    logits = exact(*ids)
    model = copy.deepcopy(exact).float()
    with torch.autocast("cpu", torch.bfloat16):
        states = model.encode(*ids[:2]).states
        narrow = model(*ids)
    assert states.dtype == narrow.dtype == torch.bfloat16
    error = (narrow.double() - logits).square().mean().sqrt()
    plain_error = (copy.deepcopy(exact).bfloat16()(*ids).double() - logits).square().mean().sqrt()
    assert error <= 2 * plain_error
    narrow.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("order", ["post", "pre"])
def test_only_pre_order_ends_with_a_norm(order):
    model = build(norm=order)
    norm = nn.LayerNorm if order == "pre" else nn.Identity
    assert isinstance(model.encoder_norm, norm)
    assert isinstance(model.decoder_norm, norm)


@pytest.mark.parametrize(("variant", "rotated"), [("softmax", False), ("rela-g", True)])
def test_one_compiled_program_takes_all_shapes_but_the_first(variant, rotated):
    """The first is compiled for itself; a size that is fixed by the way would compile a program for every one."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = build(variant=variant, dropout=0.1, attention_dropout=0.1, dtype=torch.float32).train()
    for layer in (model.encoder[0], model.decoder[0]):
        torch.compiler.reset()
        graphs.clear()
        compiled = torch.compile(layer, backend=keep)
        for batch, length in [(25, 12), (33, 9), (16, 20), (7, 50)]:
            x, source, lengths = *torch.randn(2, batch, length, 16), torch.full((batch,), length)
            rotation = model.rotation(torch.randint(0, 9, (batch, length))) if rotated else None
            compiled(
                *((x, lengths, rotation) if layer is model.encoder[0] else (x, source, lengths, rotation, rotation))
            )
        assert len(graphs) == 2
