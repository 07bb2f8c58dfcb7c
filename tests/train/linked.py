"""Files of the built-in grammar with its exact word links, and settings of trainings on them that take seconds."""

from rectiformer.measure.alignment import Links, format_links
from rectiformer.text.grammar import draw_sentences

SETTINGS = [
    "vocabulary.size=300",
    "model.hidden_size=48",
    "model.num_heads=2",
    "model.ffn_size=48",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=8e-3",
    "training.warmup=30",
    "training.batch_tokens=600",
    "training.device=cpu",
    "validation.sentences=1",
]


def write_corpus(folder, pairs=2000, valid=60):
    """Training and validation text in a folder, train.links, and the settings that name them."""
    names = {}
    for split, count in (("train", pairs), ("valid", valid)):
        drawn = list(draw_sentences(count, 1, split))
        texts = {
            "de": [pair.source for pair in drawn],
            "en": [pair.target for pair in drawn],
            "links": [format_links(pair.sure, pair.possible) for pair in drawn],
        }
        for ending, lines in texts.items():
            names[f"{split}.{ending}"] = path = folder / f"{split}.{ending}"
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    keys = {"source": "train.de", "target": "train.en", "valid_source": "valid.de", "valid_target": "valid.en"}
    return [f"data.{key}={names[name]}" for key, name in keys.items()] + [f"data.links={names['train.links']}"]


def draw_gold(count):
    """Test sentences and their links."""
    drawn = list(draw_sentences(count, 1, "test"))
    gold = [Links(frozenset(pair.sure), frozenset(pair.possible)) for pair in drawn]
    return [(pair.source, pair.target) for pair in drawn], gold
