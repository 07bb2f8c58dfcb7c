"""Feed-forward layers as memories, as ReLUFormer's paper has it: real trainings on the grammar, two seeds."""

from statistics import fmean

import pytest
from train.briefly import trainings

pytestmark = pytest.mark.long
MEMORIES, SEEDS = ("relu", "softmax", "softmax-ln"), (1, 2)
SETTINGS = (
    "data.sentences=8000",
    "data.valid_sentences=100",
    "vocabulary.size=600",
    "model.variant=softmax",
    "model.hidden_size=64",  # so narrow that the memories have to hold the words
    "model.ffn_size=512",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.norm=pre",
    "model.tie_embeddings=target",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.steps=250",
    "training.batch_tokens=600",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=3e-3",
    "training.warmup=80",
    "training.device=cpu",
    "validation.every=250",
    "checkpoint.every=250",
)


@pytest.fixture(scope="module")
def bleu(tmp_path_factory):
    """Validation BLEU of each memory, mean over seeds."""
    with trainings(tmp_path_factory.mktemp("memories"), SETTINGS) as score:
        return {
            memory: fmean(score(f"model.memory={memory}", f"training.seed={seed}") for seed in SEEDS)
            for memory in MEMORIES
        }


def test_a_softmax_memory_is_below_relu_and_a_layer_norm_helps_it(bleu):
    """Seen: ReLU 25.9, softmax with LayerNorm 21.8, softmax 16.6; of each of four seeds ReLU is 6 above softmax and
    LayerNorm 3. It takes back half after so few updates; the paper has it take back all in the end."""
    assert bleu["softmax"] < bleu["softmax-ln"]
    assert bleu["softmax"] < bleu["relu"]
