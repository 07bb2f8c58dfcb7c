"""A model of the grammar's documents that is so small that a GPU trains it in seconds."""

SMALL_DOCUMENTS = (
    "data.grammar=documents",
    "data.mixed=true",
    "data.valid_sentences=20",
    "vocabulary.size=400",
    "model.hidden_size=64",
    "model.ffn_size=128",
    "model.norm=pre",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.schedule=constant",
    "training.device=cuda",
)
