"""Analyze one document in a process of its own; print JSON: its subwords, and the most memory before and after."""

import json
import random
import resource

import torch

from rectiformer.analyze.findings import analyze
from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.measure.alignment import Links
from rectiformer.model.transformer import Transformer
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator

WORDS = ["das", "kleine", "Haus", "steht", "am", "alten", "Fluss", "und", "der", "Hund"]
TOKENS = 2048


def most_memory():
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = random.Random(0).choices(WORDS, k=TOKENS)
    vocabulary = Vocabulary.train(
        [" ".join(words[start : start + 8]) for start in range(800)], VocabularyConfig(size=60)
    )
    # configs/base.toml in width, heads and slots; of its six layers one and two, which are looked at one by one.
    config = ModelConfig(
        variant="rela-g", hidden_size=512, num_heads=8, encoder_layers=1, decoder_layers=2, ffn_size=2048
    )
    translator = Translator(
        Transformer(config, vocabulary.size, vocabulary.size), vocabulary, vocabulary, max_length=TOKENS
    )
    while len(vocabulary.encode(" ".join(words))) >= TOKENS:
        words.pop()
    document = " ".join(words)
    before = most_memory()
    found = analyze(translator, [(document, document)], gold=[Links(frozenset({(0, 0)}))], quality=False)
    assert len(found.sites) == 5
    assert len(found.alignment) == 2 * 9 * 2
    print(json.dumps({"tokens": found.data.source_tokens, "before": before, "after": most_memory()}))


if __name__ == "__main__":
    main()
