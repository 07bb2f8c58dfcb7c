"""A Transformer that decodes without a cache: what every cached decoding must agree with."""

import copy

import torch

from rectiformer.model.transformer import Transformer


class Written:
    """All tokens of every hypothesis so far, and the encoded sources."""

    def __init__(self, context):
        self.context, self.tokens = context, []  # [B * K] each

    def reorder(self, rows):
        self.tokens = [tokens[rows] for tokens in self.tokens]

    def keep(self, sources, beam):
        self.context = self.context.select(sources)
        self.tokens = [tokens.view(-1, beam)[sources].flatten() for tokens in self.tokens]


class RecomputingTransformer(Transformer):
    def begin(self, context):
        return Written(context)

    def step(self, ids, state):
        state.tokens.append(ids.clone())  # `ids` is where the next choice will be written
        sources = torch.arange(len(state.context.states), device=ids.device)
        context = state.context.select(sources.repeat_interleave(len(ids) // len(sources)))
        return self.logits(self.decode(torch.stack(state.tokens, 1), context)[:, -1])


def recomputing(model):
    """The same model and weights, each step computed from all tokens so far."""
    other = copy.copy(model)
    other.__class__ = RecomputingTransformer
    return other
