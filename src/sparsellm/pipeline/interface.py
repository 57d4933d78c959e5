"""`prune` in Python: the fields of a recipe as keywords, and models and texts in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from sparsellm.checkpoints.loading import named_model
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.observers.display import Display
from sparsellm.observers.events import NextRun, Observer, combine_observers
from sparsellm.outputs.saving import Result
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.several import RunSet
from sparsellm.recipes.fields import MethodName
from sparsellm.recipes.file import read_recipes, split_sparsity
from sparsellm.recipes.keyword_types import PruneKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.recipes.own_method import method_fields
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import Pattern
from sparsellm.texts.in_memory import CalibrationData, Given, given_text, given_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@overload
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = ...,
    sparsity: str | float | Pattern | None = ...,
    *,
    calibration: str | Path | CalibrationData | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> Result: ...
@overload
def prune(
    model: str | Path,
    method: MethodName | str | LayerSolver | BlockMethod = ...,
    sparsity: list[Any] | tuple[Any, ...] = ...,
    *,
    calibration: str | Path | CalibrationData | None = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> list[Result]: ...
@recipe_keywords(PruneKeywords)
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = "sparsellm",
    sparsity: str | float | Pattern | list[Any] | tuple[Any, ...] | None = None,
    *,
    calibration: str | Path | CalibrationData | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[PruneKeywords],
) -> Result | list[Result]:
    """Prune a model.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory, which is pruned in place.
        method: One that `sparsellm info` lists; or an object: a solver, which prunes each layer for its own output, or a
            method, also of your own (docs/adding-a-method.md).
        sparsity: "70%", 0.7, or "2:4" to remove 2 of every 4 weights. Several, as [0.5, 0.6] or "50%,60%", give a result each;
            what they share is computed once. Default: "50%", or set by `bits`.
        calibration: A text file, the name of a text (c4, wikitext2, ptb, demo), or data: texts, chat messages, token ids,
            padded batches, a data set or a data loader (see `sparsellm.texts.in_memory.read_in_memory`). Every method but
            magnitude needs it.
        tokenizer: Tokenizer of a model in memory, for calibration on text.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives every stage, layer, epoch and block (see `sparsellm.observers.events`).
        **settings: Any other field of `Recipe`.

    Returns:
        The pruned model with its report; for several sparsities a list, with all models in memory.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
    """
    fields, source = named_model(model, tokenizer)
    texts, given = texts_in_memory(calibration, settings)
    kind, chosen = method_fields(method, settings)
    recipes = read_recipes({**fields, **settings, **chosen, "sparsity": sparsity, **texts}, kind=kind)
    several = bool(split_sparsity(sparsity))
    if several and source is not None:
        raise InvalidSetting(
            f"A model in memory is pruned in place and can have one sparsity, got {len(recipes)}. Pass the model's folder."
        )
    with Display("auto" if progress else "off") as display, tempfile.TemporaryDirectory() as folder:
        observer = combine_observers(display, observe)
        if not several:
            return prune_run(recipes[0], observer, given=given, source=source)
        runs, results = RunSet(observer, Path(folder)), []
        for number, recipe in enumerate(recipes, 1):
            observer(NextRun(number, len(recipes), recipe.label, alike=True))
            results.append(runs.run(recipe, given=given))
        return results


def texts_in_memory(calibration: Any, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Given]:
    """The recipe's `calibration` and `evaluate`, and the data that replace them, if they are given in memory."""
    text, data = given_text(calibration)
    fields: dict[str, Any] = {"calibration": text}
    given = {} if data is None else {"calibration": data}
    if "evaluate" in settings:
        fields["evaluate"], data = given_texts(settings["evaluate"], settings.get("text_field"))
        given |= {} if data is None else {"evaluate": data}
    return fields, given
