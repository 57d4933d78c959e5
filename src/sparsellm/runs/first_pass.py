"""A model run on a few tokens before work begins: some values of a configuration build a model that cannot compute."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.activations.walk import walk
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.partial_forward import input_device as home_of
from sparsellm.models.partial_forward import model_errors, prediction_head
from sparsellm.runtime import collectives

TOKENS = 16
"""Tokens in the window."""


@torch.no_grad()
def check_runs(loaded: LoadedModel, by_block: bool) -> None:
    """Run a model on one short window.

    Args:
        home: The model, and where its weights are.
        by_block: Whether it is run block by block, as it is pruned, or as a whole. Of a model whose weights are read block by
            block the first block alone is run: to read the others takes as long as a large part of the work itself.

    Raises:
        UnsupportedModel: The model's own code fails.
        NonFinite: A block writes NaN or infinity.
    """
    model = loaded.model
    tokens = torch.arange(TOKENS).view(1, -1) % model.get_input_embeddings().num_embeddings
    with model_errors(model, "as its config.json says"):
        if by_block:
            _by_block(loaded, tokens)
        else:
            with eval_mode(model), compute_dtype_context(model, loaded.compute):
                logits = model(input_ids=tokens.to(home_of(model)), use_cache=False).logits
                assert logits.shape[:2] == tokens.shape, f"logits of {tuple(logits.shape)}"


def _by_block(loaded: LoadedModel, tokens: Tensor) -> None:
    """One window through the blocks, or through the first of them, and through what is behind them."""
    blocks = blocks_of(loaded.model)
    last = 0 if loaded.offloaded else len(blocks) - 1
    batches = [tokens] * collectives.world()  # each process takes one
    for block, inputs in walk(loaded.model, batches, last + 1, loaded.compute, weights=loaded.weights, storage=loaded.storage):
        if block.index == last:
            inputs.advance(block)
            with loaded.weights.non_block(), prediction_head(loaded.model, blocks, loaded.compute) as predict:
                predict(tokens, inputs.pruned[0])
