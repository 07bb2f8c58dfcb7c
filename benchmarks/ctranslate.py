"""Our softmax model in CTranslate2, so that both engines decode with the same weights; a token's name is its id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rectiformer.integrations.ctranslate2 import write_model
from rectiformer.integrations.export import require_exportable
from rectiformer.model.transformer import Transformer
from rectiformer.translate.options import Specials

POSITIONS = 512


def names(ids: range | list[int]) -> list[str]:
    """Tokens as CTranslate2 is given them."""
    return [str(token) for token in ids]


@contextmanager
def exported(model: Transformer, specials: Specials) -> Iterator[Any]:
    """A float32 `ctranslate2.Translator` of the model on the CPU, with as many threads as torch has."""
    import ctranslate2

    require_exportable(model.config, "ctranslate2")
    tokens = [names(range(len(table))) for table in (model.source_embedding.table, model.output)]
    with TemporaryDirectory() as folder:
        write_model(model, *tokens, specials, Path(folder), POSITIONS)
        yield ctranslate2.Translator(
            folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
        )


def translate(
    translator: Any, sources: list[list[int]], beam: int, length: int, length_penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """Exactly `length` tokens for each source, which ends with eos, and their score."""
    found = translator.translate_batch(
        [names(source[:-1]) for source in sources],  # CTranslate2 adds eos
        beam_size=beam,
        max_batch_size=len(sources),
        min_decoding_length=length,
        max_decoding_length=length,
        length_penalty=length_penalty,
        return_scores=True,
    )
    return [([int(name) for name in each.hypotheses[0]], each.scores[0]) for each in found]
