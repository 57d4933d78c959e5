"""`prune` in Python: the fields of a recipe as keywords, and models and texts in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from sparsellm.checkpoints.loading import InMemoryModel, named_model
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod
from sparsellm.observers.display import Display
from sparsellm.observers.events import NextRun, Observer, combine_observers
from sparsellm.outputs.fingerprint import Inputs, run_inputs
from sparsellm.outputs.report import Digests, Report
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import Output, read_output
from sparsellm.pipeline.preparation import prepare_run
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.run import RunArguments
from sparsellm.pipeline.several import RunSet, output_folders, run_outputs
from sparsellm.recipes.fields import MethodName
from sparsellm.recipes.file import read_recipes, split_sparsity
from sparsellm.recipes.keyword_types import PruneKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.recipes.own_method import method_fields
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime import collectives
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import Pattern
from sparsellm.texts.in_memory import CalibrationData, Given, given_text, given_texts
from sparsellm.texts.paths import local_path

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
    inplace: bool = ...,
    output: None = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> Result: ...
@overload
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = ...,
    sparsity: list[Any] | tuple[Any, ...] = ...,
    *,
    calibration: str | Path | CalibrationData | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    inplace: bool = ...,
    output: None = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> list[Result]: ...
@overload
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = ...,
    sparsity: str | float | Pattern | None = ...,
    *,
    calibration: str | Path | CalibrationData | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    inplace: bool = ...,
    output: str | Path,
    resume: bool = ...,
    restart: bool = ...,
    overwrite: bool = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> Output: ...
@overload
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = ...,
    sparsity: list[Any] | tuple[Any, ...] = ...,
    *,
    calibration: str | Path | CalibrationData | None = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    inplace: bool = ...,
    output: str | Path,
    resume: bool = ...,
    restart: bool = ...,
    overwrite: bool = ...,
    progress: bool = ...,
    observe: Observer | None = ...,
    **settings: Unpack[PruneKeywords],
) -> list[Output]: ...
@recipe_keywords(PruneKeywords)
def prune(
    model: str | Path | PreTrainedModel,
    method: MethodName | str | LayerSolver | BlockMethod = "sparsellm",
    sparsity: str | float | Pattern | list[Any] | tuple[Any, ...] | None = None,
    *,
    calibration: str | Path | CalibrationData | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    inplace: bool = True,
    output: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[PruneKeywords],
) -> Result | Output | list[Result] | list[Output]:
    """Prune a model, in memory or into a folder.

    With `output` the run is that of the command `sparsellm prune`: it takes models that are larger than memory, keeps every
    finished block, can be resumed after it was killed, and verifies what it wrote. Without, the model must fit in memory.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory.
        method: One that `sparsellm info` lists; or an object: a solver, which prunes each layer for its own output, or a
            method, also of your own (docs/build-on-sparsellm.md).
        sparsity: "70%", 0.7, or "2:4" to remove 2 of every 4 weights. Several, as [0.5, 0.6] or "50%,60%", give a result each;
            what they share is computed once. Default: "50%", or set by `bits`.
        calibration: A text file, the name of a text (c4, wikitext2, ptb, demo), or data: texts, chat messages, token ids,
            padded batches, a data set or a data loader (see `sparsellm.texts.in_memory.read_in_memory`). Every method but
            magnitude needs it.
        tokenizer: Tokenizer of a model in memory, for calibration on text.
        inplace: Whether a model in memory is pruned itself. Otherwise a copy of it is, and one for each of several sparsities:
            with two of them three models are in memory.
        output: Folder to write; several sparsities have a folder each in it, as "50" and "2-4".
        resume: Continue an unfinished output, and keep a finished one, of the same settings, model, texts and method. A model
            or texts in memory must be the dense model and the texts that the run began with. Default: an unfinished output
            is an error.
        restart: Discard an unfinished output, and start over.
        overwrite: Replace a finished output that sparsellm wrote.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives every stage, layer, epoch and block (see `sparsellm.observers.events`).
        **settings: Any other field of `Recipe`.

    Returns:
        The pruned model with its report; for several sparsities a list, with all models in memory. With `output`, the folder
        with its report, or a list of these: the model is not kept in memory.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
        OutputExists: The output exists, and `overwrite` is not set.
        CannotResume: The output is unfinished and neither `resume` nor `restart` is set; it is of other settings, or of a
            class that was changed since; or another process is writing it.
    """
    fields, source = named_model(model, tokenizer)
    texts, given = texts_in_memory(calibration, settings)
    kind, chosen = method_fields(method, settings)
    recipes = read_recipes({**fields, **settings, **chosen, "sparsity": sparsity, **texts}, kind=kind)
    several = bool(split_sparsity(sparsity))
    if several and source and inplace:
        raise InvalidSetting(
            f"A model in memory is pruned in place and can have one sparsity, got {len(recipes)}. Pass `inplace=False` for "
            "copies, or the model's folder."
        )
    _check_output_settings(output, given, resume=resume, restart=restart, overwrite=overwrite)

    def run(recipe: Recipe, observe: Observer, **place: Unpack[RunArguments]) -> Result:
        copied = source if source is None or inplace else replace(source, model=deepcopy(source.model))
        return prune_run(recipe, observe, given=given, source=copied, **place)

    with Display("auto" if progress else "off") as display:
        observer = combine_observers(display, observe)
        if output is None:
            return _prune_in_memory(recipes, observer, run) if several else run(recipes[0], observer)
        folders = output_folders(output, recipes)
        run_outputs(
            output,
            folders,
            lambda: nullcontext(observer),
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            function=run,
            inputs=cache(partial(_inputs_in_memory, recipes[0], given, source)) if given or source else None,
        )
    outputs = [_written(folder) for folder in folders]
    return outputs if several else outputs[0]


def _written(folder: Path) -> Output:
    """The output in a folder, as the main process reads it: others may be on machines that do not have the folder."""
    content = collectives.broadcast_object(read_output(local_path(folder)).content if collectives.is_main() else None)
    return Output(folder, Report.from_dict(content), Digests(**content["digests"]), content)


def _prune_in_memory(recipes: Sequence[Recipe], observer: Observer, run: Callable[..., Result]) -> list[Result]:
    """Run recipes one after the other, with what they share in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        runs, results = RunSet(observer, Path(folder), function=run), []
        for number, recipe in enumerate(recipes, 1):
            observer(NextRun(number, len(recipes), recipe.label, alike=True))
            results.append(runs.run(recipe))
        return results


def _check_output_settings(output: str | Path | None, given: Given, **replace: bool) -> None:
    """Raise InvalidSetting for settings of an output where there is none, and for data that cannot be read again for one."""
    if output is None:
        if (setting := next((name for name, value in replace.items() if value), None)) is not None:
            raise InvalidSetting(f"`{setting}` is for a run that writes a folder: pass `output`, or leave it out.")
        return
    data = [("calibration", given.get("calibration")), *(("evaluate", x) for x in given.get("evaluate", {}).values())]
    for name, value in data:
        if isinstance(value, Iterator):
            raise InvalidSetting(
                f"`{name}` is a {type(value).__name__}, which can be read only once, and a run with `output` may be resumed: "
                "pass a list, a data set or a data loader."
            )


def _inputs_in_memory(recipe: Recipe, given: Given, source: InMemoryModel | None) -> Inputs:
    """Digests of what a run reads whose model or texts are in memory; the texts are tokenized for them."""
    with remarks_to(lambda *_: None):
        ready = prepare_run(recipe, Report(recipe), lambda _: None, given=given, source=source)
    return run_inputs(recipe, ready.source) | ready.inputs_in_memory()


def texts_in_memory(calibration: Any, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Given]:
    """The recipe's `calibration` and `evaluate`, and the data that replace them, if they are given in memory."""
    text, data = given_text(calibration)
    fields: dict[str, Any] = {"calibration": text}
    given = {} if data is None else {"calibration": data}
    if "evaluate" in settings:
        fields["evaluate"], data = given_texts(settings["evaluate"], settings.get("text_field"))
        given |= {} if data is None else {"evaluate": data}
    return fields, given
