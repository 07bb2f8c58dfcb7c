"""Whole documents on a GPU: the same translations as on a CPU, positions counted by sentence and decoding captured."""

import pytest
from small_documents import SMALL_DOCUMENTS

from rectiformer.studies.recipes import attention_settings
from rectiformer.text.grammar import draw_documents
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch's own warnings
SETTINGS = [
    *SMALL_DOCUMENTS,
    "data.segment_length=96",
    "data.sentences=2000",
    "model.positions=sentence",
    "training.steps=150",
    "training.batch_tokens=2000",
    "training.learning_rate=3e-3",
    "training.warmup=40",
    "training.precision=fp32",
    "training.compile=no",
    "validation.every=150",
    "checkpoint.every=150",
]
DOCUMENTS = 8


@pytest.mark.parametrize("variant", ["softmax", "rela-g", "reluformer", "relu2-open"])
def test_documents_are_translated_as_on_a_cpu(variant, tmp_path):
    train(load_config(None, [*SETTINGS, *attention_settings(variant)]), tmp_path / "run")
    sources = [[pair.source for pair in document] for document in draw_documents(DOCUMENTS, 1, "test")]
    on_gpu, on_cpu = (
        [
            each.sentences
            for each in translate_documents(
                Translator.from_run(tmp_path / "run", device=device),
                sources,
                SearchOptions(beam=4),
                warn=lambda _: None,
            )
        ]
        for device in ("cuda", "cpu")
    )
    assert [len(each) for each in on_gpu] == [len(each) for each in sources]
    assert any(sentence for each in on_gpu for sentence in each)
    pairs = [pair for ours, theirs in zip(on_gpu, on_cpu, strict=True) for pair in zip(ours, theirs, strict=True)]
    # Rounding decides where two translations are as likely; everywhere else they are the same.
    assert sum(ours == theirs for ours, theirs in pairs) >= 0.9 * len(pairs)
