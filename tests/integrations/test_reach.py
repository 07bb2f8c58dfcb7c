"""Hugging Face models whose attention is their own: warned of at the first forward, named by `verify`, never silent."""

import copy
import io

import pytest
import torch
from integrations.small_models import BODY, HEADS, LM, MARIAN, SPECIAL, build, draw_ids
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BigBirdPegasusConfig,
    BloomConfig,
    CLIPConfig,
    DebertaV2Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LEDConfig,
    LlamaConfig,
    MPNetConfig,
    MptConfig,
    ProphetNetConfig,
    SiglipVisionConfig,
    T5Config,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from rectiformer.errors import ArgumentError
from rectiformer.integrations.reach import OBSERVERS, TRACES, first_forward
from rectiformer.integrations.transformers import verify

T5 = {**SPECIAL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": HEADS, "num_layers": 2, "decoder_start_token_id": 3}
PROPHETNET = {
    f"num_{side}_{what}": number for side in ("encoder", "decoder") for what, number in
    (("layers", 2), ("attention_heads", HEADS))
}  # fmt: skip
SILENT = {
    "deberta-v2": (AutoModel, lambda: DebertaV2Config(**BODY, **SPECIAL), "DisentangledSelfAttention"),
    "mpnet": (AutoModel, lambda: MPNetConfig(**BODY, **SPECIAL), "MPNetSelfAttention"),
    "prophetnet": (
        AutoModelForSeq2SeqLM,
        lambda: ProphetNetConfig(
            **SPECIAL, **PROPHETNET, hidden_size=32, encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=3
        ),
        "ProphetNetNgramSelfAttention",
    ),
}
"""Models that take the name and compute their softmax, and which class does."""


def set_t5():
    """A T5 whose attention is set after loading, which transformers does not pass on to its stacks."""
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**T5))
    model.set_attn_implementation("rectified")
    return model.eval()


def build_silent(kind):
    if kind == "t5":
        return set_t5()
    auto, config, _ = SILENT[kind]
    return auto.from_config(config(), attn_implementation="rectified").eval()


def call(model):
    ids = draw_ids(2, 6)
    return model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))


@pytest.mark.parametrize("kind", [*SILENT, "t5"])
@torch.no_grad()
def test_a_first_forward_that_never_reached_us_warns_once(kind):
    model = build_silent(kind)
    attending = "T5Attention" if kind == "t5" else SILENT[kind][2]
    with pytest.warns(
        UserWarning, match=rf"set to 'rectified' but keeps its own attention in .*{attending} \("
    ) as seen:
        call(model)
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    call(model)  # the second is not followed, and a warning would be an error here
    assert not OBSERVERS
    assert not TRACES
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [*SILENT, "t5"])
def test_verify_names_the_modules_that_keep_their_softmax(kind):
    model = build_silent(kind)
    with pytest.raises(ArgumentError, match=r"keeps its own attention in \w+ \([\w.]+ and \d more\)") as error:
        verify(model)
    assert "\n" not in str(error.value)
    if kind == "t5":
        assert "their configuration says 'sdpa', which set_attn_implementation does not reach" in str(error.value)


@torch.no_grad()
def test_a_t5_loaded_with_the_name_is_silent_and_verified():
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**T5), attn_implementation="rectified").eval()
    call(model)
    reach = verify(model)
    assert len(reach.reached) == 6
    assert not reach.missed + reach.idle


OWN_CLASSES = {
    "falcon": lambda: FalconConfig(**SPECIAL, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS),
    "gptj": lambda: GPTJConfig(**SPECIAL, n_embd=32, n_layer=2, n_head=HEADS, rotary_dim=4),
    "gpt-neo": lambda: GPTNeoConfig(
        **SPECIAL, hidden_size=32, num_layers=2, num_heads=HEADS, attention_types=[[["global", "local"], 1]]
    ),
}


@pytest.mark.parametrize("kind", OWN_CLASSES)
def test_models_with_attention_classes_of_their_own_are_refused_in_one_line(kind):
    with pytest.raises(ArgumentError, match=r"has attention classes of its own \(eager, .*'rectified'; use") as error:
        AutoModelForCausalLM.from_config(OWN_CLASSES[kind](), attn_implementation="rectified")
    assert "\n" not in str(error.value)
    AutoModelForCausalLM.from_config(OWN_CLASSES[kind](), attn_implementation="eager")


OWN_MASKS = {
    "bloom": lambda: BloomConfig(**SPECIAL, hidden_size=32, n_layer=2, n_head=HEADS),
    "mpt": lambda: MptConfig(**SPECIAL, d_model=32, n_layers=2, n_heads=HEADS),
    "led": lambda: LEDConfig(**MARIAN, attention_window=6),
}


@pytest.mark.parametrize("kind", OWN_MASKS)
def test_models_that_apply_masks_themselves_are_refused_in_one_line(kind):
    auto = AutoModelForSeq2SeqLM if kind == "led" else AutoModelForCausalLM
    model = auto.from_config(OWN_MASKS[kind](), attn_implementation="rectified").eval()
    with pytest.raises(ArgumentError, match=r"applies its attention mask itself .* keep its softmax") as error:
        call(model)
    assert "\n" not in str(error.value)
    with pytest.raises(ArgumentError, match=r"keeps its own attention in (Bloom|Mpt|LED)"):
        verify(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "marian", "gemma3", "modernbert", "vit"])
def test_verify_passes_what_reaches_us_and_changes_nothing(kind):
    model = build(kind, "rela").train()
    before = copy.deepcopy(model.state_dict())
    reach = verify(model)
    assert len(reach.reached) == (6 if kind == "marian" else 2)
    assert not reach.missed
    assert all(module.training for module in model.modules())
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not OBSERVERS


@pytest.mark.parametrize(
    "config",
    [
        CLIPConfig(
            text_config={**BODY, **SPECIAL, "projection_dim": 16},
            vision_config={**BODY, "image_size": 12, "patch_size": 4, "projection_dim": 16},
            projection_dim=16,
        ),
        WhisperConfig(**MARIAN, num_mel_bins=8, max_source_positions=10, max_target_positions=20),
        Wav2Vec2Config(**BODY, vocab_size=40, conv_dim=(8,) * 7, num_conv_pos_embeddings=4,
                       num_conv_pos_embedding_groups=2),
    ],
    ids=["clip", "whisper", "wav2vec2"],
)  # fmt: skip
def test_verify_needs_no_data_for_images_and_sounds(config):
    reach = verify(AutoModel.from_config(config, attn_implementation="rectified"))
    assert not reach.missed + reach.idle


@pytest.mark.parametrize(
    ("auto", "config", "place"),
    [
        (
            AutoModel,
            lambda: SiglipVisionConfig(**BODY, image_size=12, patch_size=4),
            r"MultiheadAttention \(head.attention\)",
        ),
        (
            AutoModelForSeq2SeqLM,
            lambda: BigBirdPegasusConfig(**MARIAN, block_size=2, num_random_blocks=1),
            r"BigBirdPegasusSelfAttention \(model.encoder.layers.0.self_attn.self\)",
        ),
    ],
    ids=["a softmax in the pooling head", "modules replaced while it runs"],
)
def test_verify_names_the_one_part_that_is_not_ours(auto, config, place):
    with pytest.raises(ArgumentError, match=f"keeps its own attention in {place}"):
        verify(auto.from_config(config(), attn_implementation="rectified"))


def test_verify_takes_inputs_and_says_when_it_needs_them():
    model = AutoModel.from_config(ViTConfig(**BODY, image_size=12, patch_size=4), attn_implementation="rectified")
    assert verify(model, pixel_values=torch.zeros(1, 3, 12, 12)).reached
    model.config.image_size = 16  # the embeddings were made for 12
    with pytest.raises(ArgumentError, match=r"ViTModel does not run on the dummy inputs pixel_values \(ValueError: "):
        verify(model)


def test_verify_of_another_attention_says_which_it_is():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LM))
    with pytest.raises(ArgumentError, match=r"LlamaForCausalLM is set to 'sdpa', none of ours \(.*rectified"):
        verify(model)
    with pytest.raises(ArgumentError, match="Linear is set to no attention implementation"):
        verify(nn.Linear(1, 1))


def test_what_is_refused_is_refused_by_verify_too():
    model = AutoModelForCausalLM.from_config(Gemma2Config(**LM), attn_implementation="rectified")
    with pytest.raises(ArgumentError, match="Gemma2Attention passes softcap"):
        verify(model)


def test_a_part_that_was_given_another_attention_on_purpose_is_left_alone():
    config = CLIPConfig(
        text_config={**BODY, **SPECIAL, "projection_dim": 16},
        vision_config={**BODY, "image_size": 12, "patch_size": 4, "projection_dim": 16},
        projection_dim=16,
    )
    model = AutoModel.from_config(
        config, attn_implementation={"": "rela", "text_config": "rela", "vision_config": "eager"}
    )
    reach = verify(model)
    assert reach.reached == ("text_model.encoder.layers.0.self_attn", "text_model.encoder.layers.1.self_attn")
    assert not reach.missed


def test_a_failed_first_forward_is_followed_again():
    model = build_silent("deberta-v2")
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert not TRACES
    assert not OBSERVERS
    with pytest.warns(UserWarning, match="keeps its own attention"):
        call(model)


def test_an_interrupted_first_forward_is_followed_again():
    model = build_silent("deberta-v2")
    handle = model.encoder.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(model)
    handle.remove()
    with pytest.warns(UserWarning, match="keeps its own attention"):
        call(model)
    assert not TRACES
    assert not OBSERVERS
    assert not any(module._forward_pre_hooks for module in model.modules())


def interrupt(*_):
    raise KeyboardInterrupt


def test_setting_a_model_that_cannot_be_set_warns():
    model = AutoModel.from_config(SILENT["deberta-v2"][1]())
    with pytest.warns(UserWarning, match=r"set_attn_implementation\('rectified'\) changed nothing: it keeps its own"):
        model.set_attn_implementation("rectified")
    model.set_attn_implementation("eager")


def test_the_hook_of_a_watched_model_survives_copies_and_files():
    model = build_silent("mpnet")
    assert first_forward in model._forward_pre_hooks.values()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with pytest.warns(UserWarning, match="MPNetModel is set to 'rectified' but keeps its own attention"):
            call(again)


def test_setting_the_attention_later_is_watched_and_takes_effect():
    model, ids = AutoModelForCausalLM.from_config(LlamaConfig(**LM)).eval(), draw_ids(1, 5)
    with torch.no_grad():
        before = model(ids).logits
        model.set_attn_implementation("rectified")
        assert first_forward in model._forward_pre_hooks.values()
        assert not torch.allclose(model(ids).logits, before)
    assert not model._forward_pre_hooks


def test_a_compiled_model_is_verified_uncompiled():
    """That a watched model still compiles to one graph is shown in test_transformers_training.py."""
    assert len(verify(torch.compile(build("llama"), fullgraph=True)).reached) == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "marian", "t5"])
def test_output_attentions_gives_the_weights(kind):
    model, ids = build(kind).train(), draw_ids(2, 6)
    given = {"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {}
    outputs = model(ids, attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), output_attentions=True, **given)
    names = ["encoder_attentions", "decoder_attentions", "cross_attentions"] if given else ["attentions"]
    for name in names:
        assert len(outputs[name]) == 2, name
        for weights in outputs[name]:
            rows, columns = (4 if name[0] in "dc" else 6), (4 if name[0] == "d" else 6)
            assert weights.shape == (2, HEADS, rows, columns)
            assert weights.min() == 0
            assert weights.max() > 0
            if columns == 6:
                assert not weights[1, ..., 4:].any()
            if name == "decoder_attentions" or kind in ("gpt2", "llama"):
                assert not weights.triu(1).any()
    sum(weights.sum() for weights in outputs[names[0]]).backward()


@torch.no_grad()
def test_attentions_are_those_that_mix_the_values():
    """GPT-2 keeps the flag to itself: transformers collects weights from its layers."""
    model = AutoModelForCausalLM.from_config(
        GPT2Config(**SPECIAL, n_embd=32, n_layer=1, n_head=HEADS), attn_implementation="rectified"
    ).eval()
    layer, seen = model.transformer.h[0].attn, {}
    layer.c_attn.register_forward_hook(lambda module, given, out: seen.update(v=out.chunk(3, -1)[2]))
    layer.c_proj.register_forward_pre_hook(lambda module, given: seen.update(z=given[0]))
    (weights,) = model(draw_ids(2, 7), output_attentions=True).attentions
    values = seen["v"].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_close((weights @ values).transpose(1, 2).flatten(2), seen["z"])
    assert model(draw_ids(2, 7)).attentions is None
