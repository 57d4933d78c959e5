"""The fields of a recipe, each with its type, default and description; the command line generates its options from them.

Imports pydantic only, so that `sparsellm --help` and shell completion need not wait for torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SolverName = Literal["thorough", "alps", "swift", "sparsegpt", "wanda", "magnitude"]
MethodName = Literal["sparsellm", SolverName]
TaskName = Literal["boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "piqa"]


def _field(panel: str, default: Any, description: str, default_text: str | None = None, **constraints: Any) -> Any:
    """A field of the recipe.

    Args:
        panel: The panel of `--help` that lists the option.
        default: The value of a field that is not given.
        description: The help text, one sentence.
        default_text: What is used when the value is None, in words.
        **constraints: Bounds of the value, as in `pydantic.Field`.
    """
    option: dict[str, Any] = {"panel": panel, "default_text": default_text}
    return Field(default, description=description, json_schema_extra=option, **constraints)


_model = partial(_field, "Model")
_pruning = partial(_field, "Pruning")
_data = partial(_field, "Data")
_evaluation = partial(_field, "Evaluation")
_hardware = partial(_field, "Hardware")


class RecipeFields(BaseModel):
    """The fields of `sparsellm.recipe.Recipe`, which checks that they agree."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model: str = Field(description="Checkpoint folder, model name on the Hugging Face hub, demo:opt or demo:llama.")
    revision: str | None = _model(None, "Branch, tag or commit of a model on the hub.")
    trust_remote_code: bool = _model(False, "Run the Python code that comes with the checkpoint.")
    architecture: str | None = _model(
        None, "YAML file that describes the model's architecture.", "the built-in table, or what is detected"
    )

    method: MethodName = _pruning("sparsellm", "Pruning method.")
    sparsity: str = _pruning("50%", "Fraction of the weights to remove (70%, 0.7), or N:M to remove N of every M.")
    as_published: bool = _pruning(False, "Run Algorithm 1 of the SparseLLM paper instead of this package's version.")
    solver: SolverName | None = _pruning(
        None, "Layer solver used by the method sparsellm.", "thorough, or sparsegpt with as_published"
    )
    targets: Literal["teacher", "own"] = _pruning(
        "teacher", "Outputs that each layer is fitted to: the dense model's, or the dense layer's on the pruned inputs."
    )
    residual: bool = _pruning(True, "Let output projections also correct the error of the residual stream.")
    curvature: Literal["none", "diagonal", "kronecker"] = _pruning(
        "kronecker", "Curvature of the loss by which output errors are weighted."
    )
    horizon: Literal["feedforward", "model"] = _pruning(
        "model", "Weight errors by their effect on the feed-forward output, or on the model's loss."
    )
    newton: int = _pruning(3, "Maximum number of Gauss-Newton steps on each feed-forward part.", ge=0)
    refine: int | None = _pruning(
        None, "Gradient steps on each block, with the masks held.", "0, or 100 with couple: block", ge=0
    )
    epochs: int | None = _pruning(None, "SparseLLM's number of epochs K.", "1, or 4 with as_published", gt=0)
    alpha: float = _pruning(0.1, "SparseLLM's weight alpha of the layer terms.", gt=0, allow_inf_nan=False)
    beta: float = _pruning(0.1, "SparseLLM's weight beta of the activation term.", gt=0, allow_inf_nan=False)
    couple: str | None = _pruning(
        None,
        "Layers that are pruned as one problem: none, feedforward, block or model; with as_published also blocks, as 0:12.",
        "feedforward",
    )
    couple_steps: int = _pruning(300, "Gradient steps on the whole model, with couple: model.", gt=0)
    couple_written: int | None = _pruning(
        None, "Sequences that the dense model generates for these steps.", "enough to use each about twice", ge=0
    )
    allocation: str | None = _pruning(
        None,
        "Rule that sets each layer's sparsity: uniform, owl, dlp, fisher, error, or a YAML file.",
        "fisher for the method sparsellm with an unstructured sparsity, uniform otherwise",
    )
    allocation_bounds: str | None = _pruning(
        None, "Lowest and highest sparsity that an allocation rule may give a layer, as 60%:95%.", "0%:100%"
    )
    blocks: str = _pruning("all", "Decoder blocks to prune: all, first-half, a range 0:12, or a list 3,5.")
    only: tuple[str, ...] = _pruning((), "Prune only layers with this name; * matches any text.")
    skip: tuple[str, ...] = _pruning((), "Do not prune layers with this name; * matches any text.")
    keep_zeros: bool = _pruning(False, "Keep weights that are zero in the dense model at zero.")
    true_sequential: bool = _pruning(
        False,
        "Prune each layer on the outputs of the pruned layers before it in its block (alps, swift, sparsegpt or wanda).",
    )

    calibration: str | None = _data(
        None, "Calibration text: a .txt, .raw, .json, .jsonl or .parquet file, or c4, wikitext2, ptb or demo."
    )
    text_field: str | None = _data(None, "Field that holds the text in .json, .jsonl and .parquet files.", "text")
    samples: int = _data(128, "Number of calibration sequences.", gt=0)
    written: int = _data(0, "Number of additional calibration sequences, generated by the dense model.", ge=0)
    length: int | None = _data(None, "Tokens per sequence.", "2048, or the model's maximum if smaller", gt=1)
    seed: int = _data(0, "Seed for drawing calibration sequences.", ge=0, lt=2**63)

    evaluate: tuple[str, ...] = _evaluation((), "Text to measure the perplexity on before and after, named as for calibration.")
    evaluate_limit: int | None = _evaluation(
        None, "Evaluate at most this many sequences per text.", "256 for c4, otherwise all", gt=0
    )
    prompt: tuple[str, ...] = _evaluation((), "Prompt that the dense and the pruned model continue in the report.")
    task: tuple[TaskName, ...] = _evaluation((), "Zero-shot task to measure the accuracy on.")
    task_data: str | None = _evaluation(None, "Folder with the tasks' questions as .jsonl files.", "downloaded from the hub")
    task_limit: int | None = _evaluation(None, "Evaluate at most this many questions per task.", "all", gt=0)

    memory: str | None = _hardware(None, "Maximum memory to use, as 16GiB.", "80% of the free memory")
    stream: bool | None = _hardware(
        None,
        "Load one decoder block at a time instead of the whole model.",
        "when the model needs more than half of the memory",
    )
    device: str = _hardware("auto", "Device to compute on: auto, cpu, cuda, cuda:1 or mps.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _hardware(
        "auto", "Data type of the weights; auto keeps the stored one."
    )
    batch: int | None = _hardware(None, "Sequences per forward pass.", "as many as make about 2,048 tokens", gt=0)
