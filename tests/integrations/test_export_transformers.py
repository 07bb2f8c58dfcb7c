"""transformers loads an exported folder by its own classes and computes what we compute."""

import pytest
import torch
from integrations.agreement import assert_same_greedily, share_of_same

from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.model.transformer import Transformer
from rectiformer.text.grammar import draw_sentences
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


def load(folder):
    from rectiformer.integrations.transformers import register

    register()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    assert isinstance(model, transformers.MarianMTModel)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def assert_same_logits(ours, model, batch):
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(4, ours.target.size, (len(batch.input_ids), 15), generator=generator)
    target[:, 0] = ours.target.bos
    with torch.inference_mode():
        right = ours.model(batch.input_ids, batch.attention_mask.sum(1), target)
        found = model(**batch, decoder_input_ids=target).logits
    assert (found - right).abs().max() < 1e-4


def test_marian_translates_as_the_run_does(translator, held_out, tmp_path):
    from rectiformer.integrations.marian import export_transformers

    ours = translator("softmax")
    export_transformers(ours, tmp_path / "out")
    model, tokenizer = load(tmp_path / "out")
    batch = tokenizer(held_out, return_tensors="pt", padding=True)
    assert [ids[ids != ours.source.pad].tolist() for ids in batch.input_ids] == [
        [*ours.source.encode(line), ours.source.eos] for line in held_out
    ]
    assert_same_logits(ours, model, batch)
    found = {}
    for beam in (1, 4):
        how = {"num_beams": beam, "max_length": 100, "length_penalty": 0.0 if beam > 1 else None}
        best = model.generate(**batch, **how, output_scores=True, return_dict_in_generate=True)
        texts = tokenizer.batch_decode(best.sequences, skip_special_tokens=True)
        right = ours.translate(held_out, SearchOptions(beam=beam, length_penalty=0, max_repeats=0, extra_length=40))
        found[beam] = right, texts, best.get("sequences_scores")
    assert_same_greedily(*found[1][:2])
    assert share_of_same(*found[4]) > 0.9


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "rela"},
        {"variant": "rela-i", "tie_embeddings": "all"},
        {"variant": "relu-seqlen", "tie_embeddings": "target"},
        {"variant": "reluformer", "center_keys": "no", "gamma_init": 0.7},
        {"variant": "reluformer", "center_keys": "no", "gamma_init": 0.7, "gamma_sharing": "fixed"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_rectified_models_are_the_same_in_transformers(changes, tmp_path):
    from rectiformer.integrations.marian import export_transformers

    lines = [pair.source for pair in draw_sentences(60, seed=1)]
    words = Vocabulary.train(lines, VocabularyConfig(size=120))
    torch.manual_seed(1)
    config = ModelConfig(**{"hidden_size": 32, "num_heads": 2, "ffn_size": 32, "tie_embeddings": "none", **changes})
    model = Transformer(config, words.size, words.size, bos=words.bos).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)  # no bias or gain at 0 or 1
    ours = Translator(model, words, words)
    export_transformers(ours, tmp_path / "out")
    marian, tokenizer = load(tmp_path / "out")
    assert_same_logits(ours, marian, tokenizer(lines, return_tensors="pt", padding=True))
