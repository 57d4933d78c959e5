r"""The far end of Omega: the whole model as one problem, masks held.

The paper's global goal is the distance of the pruned model's outputs from the dense model's, $\mathcal L(z_L, y)$. Here it is
the KL divergence of its predictions, lowered by gradient steps over all pruned blocks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.blocks import blocks_of, checkpointed, computed_in, evaluating, only_trained
from sparsellm.methods import Plan
from sparsellm.refinement import Descent, Refined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUPLING = Descent(200, 1e-3)
"""The usual descent of this stage; its first learning rate is the one that the method's description measured."""


@torch.no_grad()
def last_states(model: PreTrainedModel, batches: Sequence[Tensor], compute: torch.dtype | None = None) -> list[Tensor]:
    """What the model's head reads, (batch, seq, model), batch by batch: the dense model's predictions, before it is pruned."""
    with evaluating(model), computed_in(model, compute):
        body = model.base_model
        return [body(input_ids=batch.to(model.device), use_cache=False).last_hidden_state for batch in batches]


def distil(
    model: PreTrainedModel, batches: Sequence[Tensor], states: Sequence[Tensor], plan: Plan, descent: Descent
) -> tuple[Refined, tuple[str, ...]]:
    r"""Lower $\mathrm{KL}(\text{dense} \,\|\, \text{pruned})$, nats a token, over the planned blocks' parameters, in place.

    batches: token numbers, each (batch, seq). states: from `last_states`, of the dense model. plan: its layers keep their
    zeros; other linear layers of these blocks stay as they are. Returns what was gained, and the biases and norms that moved.

    Every block keeps only its inputs for the backward pass. Memory: see `sparsellm.memory`.
    """
    blocks = [block for block in blocks_of(model) if any(block.full_name(name) in plan for name in block.layers)]
    fixed = {block.full_name(name) for block in blocks for name in block.layers} - set(plan)
    parameters = {
        block.full_name(name): parameter
        for block in blocks
        for name, parameter in block.module.named_parameters()
        if block.full_name(name).rsplit(".", 1)[0] not in fixed
    }
    keep = {f"{name}.weight": parameters[f"{name}.weight"] != 0 for name in plan}
    small = {name: parameter.detach().clone() for name, parameter in parameters.items() if parameter.ndim == 1}
    head = model.get_output_embeddings()
    with evaluating(model), computed_in(model, torch.float32), only_trained(model, parameters.values()), checkpointed(blocks):

        def loss(number: int) -> Tensor:
            predicted = model(input_ids=batches[number].to(model.device), use_cache=False).logits
            return _divergence(head(states[number].float()), predicted)

        found = descent.run(parameters, keep, loss, len(batches), seed=0)
        for block in blocks:
            block.settle()
    return found, _moved(small, parameters)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over tokens of the KL divergence of two sets of logits, (batch, seq, vocabulary)."""
    wanted, found = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _moved(before: Mapping[str, Tensor], after: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """The names of the tensors that are not what they were."""
    return tuple(name for name, tensor in before.items() if not torch.equal(tensor.to(after[name].dtype), after[name]))
