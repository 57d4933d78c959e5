"""A model run on a few tokens before work begins: some values of a configuration build a model that cannot compute."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.activations.walk import walk
from sparsellm.checkpoints.loaded_model import Residence
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import computed_in, evaluating
from sparsellm.models.partial_forward import home as home_of
from sparsellm.models.partial_forward import predicting, refusing
from sparsellm.runtime import collectives

TOKENS = 16
"""Tokens in the window."""


@torch.no_grad()
def check_runs(home: Residence, by_block: bool) -> None:
    """Run a model on one short window.

    Args:
        home: The model, and where its weights are.
        by_block: Whether it is run block by block, as it is pruned, or as a whole. Of a model whose weights are read block by
            block the first block alone is run: to read the others takes as long as a large part of the work itself.

    Raises:
        UnsupportedModel: The model's own code fails.
        NonFinite: A block writes NaN or infinity.
    """
    model = home.model
    tokens = torch.arange(TOKENS).view(1, -1) % model.get_input_embeddings().num_embeddings
    with refusing(model, "as its config.json says"):
        if by_block:
            _by_block(home, tokens)
        else:
            with evaluating(model), computed_in(model, home.compute):
                logits = model(input_ids=tokens.to(home_of(model)), use_cache=False).logits
                assert logits.shape[:2] == tokens.shape, f"logits of {tuple(logits.shape)}"


def _by_block(home: Residence, tokens: Tensor) -> None:
    """One window through the blocks, or through the first of them, and through what is behind them."""
    blocks = blocks_of(home.model)
    last = 0 if home.streamed else len(blocks) - 1
    batches = [tokens] * collectives.world()  # each process takes one
    for block, inputs in walk(home.model, batches, last + 1, home.compute, weights=home.weights, storage=home.storage):
        if block.index == last:
            inputs.advance(block)
            with home.weights.ends(), predicting(home.model, blocks, home.compute) as predict:
                predict(tokens, inputs.pruned[0])
