"""Bad input gets one clear line; the words are part of the contract."""

import re

import pytest
import torch

from rectiformer import (
    ArgumentError,
    RectiformerError,
    ShapeError,
    attention,
    attention_varlen,
    attention_weights,
    explain,
)
from rectiformer.ops.decode import decode_attention

Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
NAN, INF = float("nan"), float("inf")
SHAPES = "q [B H M D] is [2, 4, 3, 8], k [B K N D] is [2, 2, 5, 8]"


def expect_refusal(error, words, q=Q, k=K, v=V, variant="rela", **arguments):
    with pytest.raises(error, match=re.escape(words)) as caught:
        attention(q, k, v, variant, **arguments)
    assert isinstance(caught.value, RectiformerError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_clashing_shapes_name_every_shape():
    expect_refusal(ShapeError, f"v has N = 4 but k has N = 5; {SHAPES}, v [B K N Dv] is [2, 2, 4, 6]", v=V[:, :, :4])
    expect_refusal(
        ShapeError,
        "k has D = 7 but q has D = 8; q [B H M D] is [2, 4, 3, 8], k [B K N D] is [2, 2, 5, 7]",
        k=K[..., :7],
    )
    expect_refusal(ShapeError, "k has B = 1 but q has B = 2", k=K[:1])
    expect_refusal(ShapeError, "q has 3 axes but needs 4; q [B H M D] is [4, 3, 8]", q=Q[0])
    expect_refusal(
        ShapeError,
        "k has 3 heads, which do not divide the 4 of q; q",
        k=torch.randn(2, 3, 5, 8),
        v=torch.randn(2, 3, 5, 6),
    )


def test_heads_of_size_0():
    words = "heads of size D = 0 have no scores; q [B H M D] is [2, 4, 3, 0], k [B K N D] is [2, 2, 5, 0]"
    expect_refusal(ShapeError, words, q=Q[..., :0], k=K[..., :0])
    with pytest.raises(ShapeError, match="heads of size D = 0 have no scores"):
        decode_attention(Q[..., :0], K[..., :0], V, key_lengths=torch.tensor([5, 5]))


def test_tensors_of_numbers_are_checked_as_numbers_are():
    for variant, name, bad, words in (
        ("entmax", "alpha", [1.0, 0.9, 0.0, NAN, INF], "variant 'entmax' needs a number above 1"),
        ("reluformer", "gamma", [0.0, -1.0, NAN, INF], "variant 'reluformer' needs a number above 0"),
    ):
        for number in bad:
            expect_refusal(ArgumentError, f"{name} = {number}, but {words}", variant=variant, **{name: number})
            for value in (torch.tensor(number), torch.tensor([2.0, number, 2.0, 2.0])):
                expect_refusal(ArgumentError, f"{name} holds {number:g}, but {words}", variant=variant, **{name: value})
    words = "exponent is a tensor, but variant 'relu2' needs a number of at least 0; give a number"
    expect_refusal(ArgumentError, words, variant="relu2", exponent=torch.tensor(1.0))


def test_where_tensors_cannot_be_read_a_number_out_of_range_is_nan():
    """As on a GPU, where reading it would wait for the device."""

    def call(gamma):
        return attention(Q, K, V, "reluformer", gamma=gamma)

    gamma = torch.tensor([-1.0, 2.0, 2.0, 2.0])
    traced, mapped = torch.compile(call, fullgraph=True, backend="eager")(gamma), torch.vmap(call)(gamma[None])[0]
    mapped_alpha = torch.vmap(lambda alpha: attention(Q, K, V, "entmax", alpha=alpha))(torch.tensor([1.0, 2.0]))
    for found in (traced, mapped):
        assert found[:, 0].isnan().all()
        torch.testing.assert_close(found[:, 1:], call(2.0)[:, 1:])
    assert mapped_alpha[0].isnan().all()
    torch.testing.assert_close(mapped_alpha[1], attention(Q, K, V, "entmax", alpha=2.0))


def test_unknown_variants_name_the_nearest():
    expect_refusal(ArgumentError, "unknown variant 'sofmax'; did you mean 'softmax'", variant="sofmax")
    expect_refusal(ArgumentError, "unknown variant 'relaf'; did you mean 'rela'", variant="relaf")
    longer = "'reluformer' or 'relu-seqlen' or 'relu2' or 'relu-exp'?"
    expect_refusal(ArgumentError, f"unknown variant 'relu'; did you mean {longer}", variant="relu")
    expect_refusal(ArgumentError, "unknown variant 'zzz'; known are softmax, sparsemax,", variant="zzz")


def test_dtypes():
    expect_refusal(
        ArgumentError, "q holds torch.int64, but attention needs a floating dtype; call .float() on it", q=Q.long()
    )
    expect_refusal(ArgumentError, "v is torch.float64 but q is torch.float32; give both one dtype", v=V.double())
    expect_refusal(ArgumentError, "attn_bias holds torch.int64", attn_bias=torch.zeros(3, 5).long())
    expect_refusal(
        ArgumentError,
        "attn_mask holds torch.float32, not booleans; a term to add to scores goes in attn_bias",
        attn_mask=torch.zeros(3, 5),
    )


def test_lengths():
    expect_refusal(ArgumentError, "key_lengths has -1; a length cannot be negative", key_lengths=[5, -1])
    expect_refusal(ArgumentError, "key_lengths has 6, beyond the 5 keys there are", key_lengths=torch.tensor([6, 2]))
    expect_refusal(ShapeError, "key_lengths is [3], but a batch of 2 needs [2]", key_lengths=[1, 2, 3])
    expect_refusal(
        ArgumentError, "key_lengths holds torch.float32, but lengths are whole numbers", key_lengths=[1.0, 2.0]
    )


def test_what_is_no_tensor_is_named():
    expect_refusal(ArgumentError, "q is a ndarray, but it needs to be a tensor", q=Q.numpy())
    expect_refusal(ArgumentError, "k is a ndarray, but it needs to be a tensor", k=K.numpy())
    expect_refusal(ArgumentError, "v is a list, but it needs to be a tensor", v=V.tolist())


def test_numbers():
    expect_refusal(ArgumentError, "scale = nan, but it must be a finite number", scale=float("nan"))
    expect_refusal(ArgumentError, "scale = inf, but it must be a finite number", scale=float("inf"))
    expect_refusal(ArgumentError, "dropout_p = 1.0, but it is a probability below 1", dropout_p=1.0)
    expect_refusal(ArgumentError, "dropout_p = -0.1, but it is a probability below 1", dropout_p=-0.1)
    expect_refusal(
        ArgumentError,
        "window_size = (-1, 2), but a query cannot see a negative number of keys to a side",
        window_size=(-1, 2),
    )
    for wrong in (1.5, (1.5, 0), (1, 2, 3), (None, 0)):
        words = f"window_size = {wrong}, but it must be a whole number or two of them, (left, right)"
        expect_refusal(ArgumentError, words, window_size=wrong)


def test_masks_and_biases_that_do_not_broadcast():
    expect_refusal(
        ShapeError,
        "attn_mask is [3, 4], which does not broadcast to [B H M N] = [2, 4, 3, 5]",
        attn_mask=torch.ones(3, 4).bool(),
    )
    expect_refusal(
        ShapeError,
        "attn_bias is [3, 3, 5], which does not broadcast to [B H M N] = [2, 4, 3, 5]",
        attn_bias=torch.zeros(3, 3, 5),
    )


def test_options():
    expect_refusal(ArgumentError, "variant 'rela' takes no options, but 'gamma' was given", gamma=1.0)
    expect_refusal(
        ArgumentError,
        "unknown option of variant 'reluformer': 'gama'; did you mean 'gamma'?",
        variant="reluformer",
        gama=1.0,
    )
    expect_refusal(
        ArgumentError, "gamma = 0.0, but variant 'reluformer' needs a number above 0", variant="reluformer", gamma=0.0
    )
    expect_refusal(
        ArgumentError, "alpha = 1.0, but variant 'entmax' needs a number above 1", variant="entmax", alpha=1.0
    )
    expect_refusal(
        ArgumentError, "keep = 2.5, but variant 'topk' needs a whole number above 0", variant="topk", keep=2.5
    )
    expect_refusal(ArgumentError, "exponent = nan, but variant 'relu2' needs", variant="relu2", exponent=float("nan"))
    expect_refusal(
        ShapeError,
        "gamma is [3], but it is one number or one for each of 4 heads",
        variant="reluformer",
        gamma=torch.ones(3),
    )


def test_backends():
    expect_refusal(ArgumentError, "unknown backend 'block'; did you mean 'blocked'?", backend="block")
    expect_refusal(
        ArgumentError,
        "backend 'blocked' cannot run this call: weights of 'softmax' depend on more than their own score",
        variant="softmax",
        backend="blocked",
    )


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("is_causal", "use causal="),
        ("mask", "use attn_mask="),
        ("attention_mask", "use attn_mask="),
        ("key_padding_mask", "use key_lengths="),
        ("bias", "use attn_bias="),
        ("window", "use window_size="),
        ("dropout", "use dropout_p="),
        ("softmax_scale", "use scale="),
        ("enable_gqa", "k and v may have fewer heads than q, with no argument for it"),
        ("heads", "the number of heads is an axis of q, [B, H, M, D]"),
        ("need_weights", "attention_weights() returns the weights"),
    ],
)
def test_argument_words_of_other_libraries_get_ours(word, way):
    expect_refusal(ArgumentError, f"attention() has no argument {word!r}; {way}", **{word: 1})
    expect_refusal(ArgumentError, f"attention() has no argument {word!r}; {way}", variant="entmax", **{word: 1})


def test_every_function_answers_in_its_own_words():

    calls = {
        "attention_varlen() has no argument 'dropout'; use dropout_p=": lambda: attention_varlen(
            Q[0], Q[0], Q[0], torch.tensor([0, 4]), torch.tensor([0, 4]), dropout=0.1
        ),
        "attention_varlen() has no argument 'mask'; only attention() has attn_mask=": lambda: attention_varlen(
            Q[0], Q[0], Q[0], torch.tensor([0, 4]), torch.tensor([0, 4]), mask=None
        ),
        "decode_attention() has no argument 'window'; use window_size=": lambda: decode_attention(
            Q, K, V, key_lengths=torch.tensor([5, 5]), window=3
        ),
        "decode_attention() has no argument 'causal'; only attention() has causal=": lambda: decode_attention(
            Q, K, V, key_lengths=torch.tensor([5, 5]), causal=True
        ),
        "attention_weights() has no argument 'dropout_p'; only attention() has dropout_p=": lambda: attention_weights(
            Q, K, dropout_p=0.1
        ),
        "attention() has no argument 'is_causal'; use causal=": lambda: explain(Q, K, V, is_causal=True),
    }
    for words, call in calls.items():
        with pytest.raises(ArgumentError, match=re.escape(words)):
            call()
