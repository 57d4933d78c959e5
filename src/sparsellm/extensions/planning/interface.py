"""`plan` in Python, with the arguments of `prune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from sparsellm.checkpoints.loading import named_model
from sparsellm.extensions.planning.measured_plan import plan_pruning
from sparsellm.extensions.planning.run_plan import RunPlan
from sparsellm.methods import BlockMethod
from sparsellm.pipeline.interface import texts_in_memory
from sparsellm.recipes.fields import MethodName
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.keyword_types import PruneKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.recipes.own_method import method_fields
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import Pattern
from sparsellm.texts.in_memory import CalibrationData

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@recipe_keywords(PruneKeywords)
def plan(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = "sparsellm",
    sparsity: str | float | Pattern | None = None,
    *,
    calibration: str | Path | CalibrationData | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | Path | None = None,
    measure: bool = False,
    **settings: Unpack[PruneKeywords],
) -> RunPlan:
    """Estimate memory and disk space of `prune` with the same arguments, without reading any weights unless time is measured.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory, whose memory counts as taken by the run.
        method: As for `prune`.
        sparsity: As for `prune`.
        calibration: As for `prune`.
        tokenizer: As for `prune`.
        output: Folder that the result would be saved to, for the free space of its disk. Default: the current folder. Nothing
            is written to it.
        measure: Whether to measure the time too: all that comes before the blocks is done, and the first block is pruned, with
            its files in a temporary folder beside `output`, or among the system's temporary files. `time` of the plan has
            that block's seconds, times the number of blocks. Not for a model in memory.
        **settings: Any other field of `Recipe`.

    Returns:
        The estimates. `fits` says whether memory and disk suffice, and `refusal` why the run would not begin: a model in memory
        is pruned in any case.

    Raises:
        SparseLLMError: As `prune`.
    """
    fields, source = named_model(model, tokenizer)
    texts, given = texts_in_memory(calibration, settings)
    kind, chosen = method_fields(method, settings)
    recipe = read_recipe({**fields, **settings, **chosen, "sparsity": sparsity, **texts}, kind=kind)
    return plan_pruning(recipe, output, given=given, source=source, measure=measure)
