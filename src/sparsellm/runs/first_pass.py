"""Test run of a model on a few tokens: some invalid configurations only fail in the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.activations.walk import walk
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.partial_forward import input_device, model_errors, prediction_head
from sparsellm.runtime import collectives

TOKENS = 16
"""Tokens of the test sequence."""


@torch.no_grad()
def check_runs(loaded: LoadedModel, by_block: bool) -> None:
    """Run a model on one short sequence.

    Args:
        loaded: The model.
        by_block: Run it block by block, as it is pruned, instead of as a whole. Of an offloaded model only the first block
            is run, since loading the others takes long.

    Raises:
        UnsupportedModel: The model's own code fails.
        NonFinite: The output of a block has NaN or infinity.
    """
    model = loaded.model
    tokens = torch.arange(TOKENS).view(1, -1) % model.get_input_embeddings().num_embeddings
    with model_errors(model, "as its config.json says"):
        if by_block:
            _run_blocks(loaded, tokens)
        else:
            with eval_mode(model), compute_dtype_context(model, loaded.compute):
                logits = model(input_ids=tokens.to(input_device(model)), use_cache=False).logits
                assert logits.shape[:2] == tokens.shape, f"logits of {tuple(logits.shape)}"


def _run_blocks(loaded: LoadedModel, tokens: Tensor) -> None:
    """Run all blocks, or only the first of an offloaded model, and the prediction head on one sequence, (1, seq)."""
    blocks = blocks_of(loaded.model)
    last = 0 if loaded.weights.on_disk else len(blocks) - 1
    batches = [tokens] * collectives.world()  # one per process
    for block, inputs in walk(loaded, batches, stop=last + 1):
        if block.index == last:
            inputs.advance(block)
            with loaded.weights.non_block(), prediction_head(loaded.model, blocks, loaded.compute) as predict:
                predict(tokens, inputs.pruned[0])
