"""What each rank of tests/model/test_sharded.py does; started processes import it by its name."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rectiformer.config import ModelConfig
from rectiformer.errors import RectiformerError
from rectiformer.model.transformer import Transformer, sharded_source
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search

VOCABULARY = 30
SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3)
OPTIONS = SearchOptions(beam=3, extra_length=6)


@dataclass(frozen=True)
class Case:
    """A variant and sources of these lengths: none of theirs fills the last chunk, and one leaves a rank no key."""

    variant: str
    norm: str = "post"
    lengths: tuple[int, ...] = (18, 5, 11)
    positions: str = "sequence"
    score_bias: str = "none"

    def __str__(self):
        return f"{self.variant} {self.norm}"


CASES = [
    Case("rela-g"),
    Case("reluformer", score_bias="open"),
    Case("relu-seqlen", "pre", positions="sentence"),
    Case("rela-i", "pre", (8, 2, 1)),
]


def build(case):
    """A small model, drawn at random and made to be sure of something."""
    torch.manual_seed(1)
    config = ModelConfig(
        hidden_size=16, num_heads=2, encoder_layers=2, decoder_layers=2, ffn_size=24, variant=case.variant,
        norm=case.norm, dropout=0.0, attention_dropout=0.0, tie_embeddings="none", positions=case.positions,
        score_bias=case.score_bias,
    )  # fmt: skip
    model = Transformer(config, VOCABULARY, VOCABULARY, separators=(4, 4)).eval()
    with torch.no_grad():
        model.output.mul_(4)
    return model


def batch(case):
    """Sources, their lengths, decoder inputs and targets."""
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(4, VOCABULARY, (len(case.lengths), max(case.lengths)), generator=generator)
    target = torch.randint(4, VOCABULARY, (len(case.lengths), 7), generator=generator)
    shifted = torch.cat([torch.full((len(case.lengths), 1), SPECIALS.bos), target[:, :-1]], 1)
    return source, torch.tensor(case.lengths), shifted, target


def encode(model, case):
    source, lengths, _, _ = batch(case)
    with torch.no_grad():
        return model.encode(source, lengths)


def losses(model, case):
    """The loss, and the gradients of all parameters one after the other."""
    source, lengths, shifted, target = batch(case)
    model.zero_grad()
    loss = F.cross_entropy(model(source, lengths, shifted).flatten(0, 1), target.flatten())
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def translate(model, case):
    source, lengths, _, _ = batch(case)
    rows = [[*row[: length - 1], SPECIALS.eos] for row, length in zip(source.tolist(), lengths.tolist(), strict=True)]
    return [(found[0].ids, found[0].score) for found in search(model, SearchBatch(rows, OPTIONS, SPECIALS))]


def find(rank, size):
    """What this rank found, by name."""
    found = {str(case): use(case) for case in CASES}
    found["refused"] = {name: error_of(call) for name, (call, _) in REFUSED.items()}
    model = build(CASES[0])
    with sharded_source(model):
        pass
    found["restored"] = torch.equal(encode(model, CASES[0]).states, encode(build(CASES[0]), CASES[0]).states)
    return found


def use(case):
    """All that one model does with shared sources."""
    model = build(case)
    with sharded_source(model):
        loss, gradients = losses(model, case)
        encoded = encode(model, case)
        state = model.begin(encoded)
        model.step(torch.full((len(case.lengths),), SPECIALS.bos), state)
        return {
            "encoded": encoded.states,
            "loss": loss,
            "gradients": gradients,
            "translations": translate(model, case),
            "cached": state.cross_caches[0].keys.shape[2],
        }


def shared(model, work):
    with sharded_source(model):
        work(model)


def observe(model):
    next(site for site in model.sites() if site.kind == "cross").attention.observer = print
    encoded = model.encode(batch(CASES[0])[0], torch.tensor(CASES[0].lengths))
    model.decode(batch(CASES[0])[2], encoded)


REFUSED = {
    "softmax": (lambda: shared(build(Case("softmax")), encode), "encoder attention cannot read a source shared by "),
    "no lengths": (
        lambda: shared(build(CASES[0]), lambda model: model.encode(batch(CASES[0])[0], None)),
        "its lengths",
    ),
    "an observer": (lambda: shared(build(CASES[0]), observe), "no observer"),
}
"""What a rank may not do, and a part of the message."""


def error_of(call):
    try:
        call()
    except RectiformerError as error:
        return str(error)
    return ""
