"""A whole run as validated data, to and from YAML."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from sparsellm.allocation import select_blocks
from sparsellm.choices import ALLOCATIONS, COUPLES, METHODS, SOLVERS, TASKS
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.memory import parse_bytes
from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.published import PublishedSparseLLM
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import Pattern, Unstructured, parse_pattern

_ONLY_DEFAULT = ("targets", "residual", "curvature", "horizon", "newton")
_ONLY_SPARSELLM = ("as_published", "solver", "epochs", "alpha", "beta", "couple", *_ONLY_DEFAULT)

NEWTON = SparseLLM.newton
"""The usual number of Gauss-Newton rounds."""

SCOPE_STEPS = {"block": 100, "model": 300}
"""The usual gradient steps of a recovery: over each block, or over the whole model."""

_NEEDS_TEXT = (
    "needs a calibration text: pass --calibration with a .txt, .json, .jsonl or .parquet "
    "file, or one of c4, wikitext2, ptb, demo."
)


class RunRecipe(BaseModel):
    """What pruning and recovery have in common: the dense model, the calibration text, the machine, what is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="folder of a checkpoint, a hub name, or demo:opt or demo:llama")
    revision: str | None = Field(None, description="of a hub name: a branch, tag or commit")
    trust_remote_code: bool = Field(False, description="run code that the checkpoint brings")
    architecture: str | None = Field(
        None, description="YAML that describes a model's form; default: the table, or what is found"
    )
    calibration: str | None = Field(None, description="file of text, or c4, wikitext2, ptb, demo")
    text_field: str | None = Field(None, description="field of the text in .json, .jsonl and .parquet; default: text")
    samples: int = Field(128, gt=0, description="calibration windows")
    length: int | None = Field(None, gt=1, description="tokens a window; default: 2048, or the model's length if less")
    seed: int = Field(0, ge=0, lt=2**63, description="of the calibration windows")
    batch: int | None = Field(None, gt=0, description="windows at a time; default: about 2,048 tokens")
    memory: str | None = Field(None, description="what the run may take, as 16GiB; default: four fifths of what is free")
    stream: bool | None = Field(
        None, description="read the model block by block; default: where it takes more than half of that memory"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of the model; auto: as stored")
    evaluate: tuple[str, ...] = Field((), description="texts to measure the perplexity on, before and after")
    evaluate_limit: int | None = Field(None, gt=0, description="windows of each text, for a try; default: all, 256 of C4")
    prompt: tuple[str, ...] = Field((), description="what the model continues, before and after, for the report")
    task: tuple[str, ...] = Field((), description="zero-shot tasks to measure the accuracy on, before and after")
    task_data: str | None = Field(None, description="folder of the tasks' questions, as .jsonl; default: from the hub")
    task_limit: int | None = Field(None, gt=0, description="questions of each task, for a try; default: all")

    @field_validator("evaluate", "prompt", "task", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("task")
    @classmethod
    def _are_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for task in value:
            if task not in TASKS:
                raise InvalidSetting(f"`task` is unknown: got {task!r}. {nearest(task, TASKS)}")
        return value

    @field_validator("memory")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value

    @property
    def memory_bytes(self) -> int | None:
        """What `memory` means, in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def sharing(self) -> str:
        """The rule by which the sparsity is shared out, or the path of a file."""
        return "uniform"

    @property
    def reads_text(self) -> bool:
        """Whether the run needs calibration windows."""
        return True

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return 0

    @property
    def model_steps(self) -> int:
        """Gradient steps over the whole model, after the blocks; 0 for none."""
        return 0

    @property
    def model_written(self) -> int | None:
        """Windows that the dense model writes for those steps; None for as many as let them read each about twice."""
        return None

    def describe(self) -> str:
        """What is done, in one line."""
        raise NotImplementedError

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class Recipe(RunRecipe):
    """Everything that decides the result of pruning, as on the command line and in YAML. See docs/cli.md for each field."""

    method: str = Field(
        "sparsellm", description="what prunes a block: sparsellm, thorough, alps, swift, sparsegpt, wanda or magnitude"
    )
    as_published: bool = Field(False, description="SparseLLM's Algorithm 1: SparseGPT inside, the last epoch returned")
    solver: str | None = Field(
        None, description="the solver inside SparseLLM: thorough, alps, swift, sparsegpt, wanda or magnitude"
    )
    sparsity: str = Field("50%", description="share of weights removed, or N:M: N of every M removed")
    written: int = Field(0, ge=0, description="calibration windows more, that the dense model writes itself")
    targets: Literal["teacher", "own"] = Field(
        "teacher", description="what layers aim at: the dense model's outputs, or their own"
    )
    residual: bool = Field(True, description="the layers that write to the stream also repair what it has lost")
    curvature: Literal["none", "diagonal", "kronecker"] = Field(
        "kronecker", description="how outputs are weighed by what they cost"
    )
    horizon: Literal["feedforward", "model"] = Field("model", description="how far errors are followed to weigh them")
    newton: int = Field(NEWTON, ge=0, description="Gauss-Newton rounds over a feed-forward part, masks held")
    epochs: int | None = Field(None, gt=0, description="SparseLLM's K; default: 1, and 4 as published")
    alpha: float = Field(0.1, gt=0, allow_inf_nan=False, description="SparseLLM's weight of fitting the layers")
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="SparseLLM's weight of fitting the activation")
    couple: str | None = Field(None, description="SparseLLM's Omega: none or feedforward; default: feedforward")
    allocation: str | None = Field(
        None,
        description="how the sparsity is shared: uniform, owl, dlp, fisher, error or a YAML file; default: docs/allocation.md",
    )
    allocation_bounds: str | None = Field(
        None, description="the least and the largest sparsity that owl, dlp, fisher or error may give a layer, as 60%:95%"
    )
    blocks: str = Field("all", description="all, first-half, a range 0:12, or a list 3,5")
    only: tuple[str, ...] = Field((), description="prune only layers of these names; * stands for anything")
    skip: tuple[str, ...] = Field((), description="leave out layers of these names")
    keep_zeros: bool = Field(False, description="weights that are zero already stay zero")
    true_sequential: bool = Field(
        False, description="alps, swift, sparsegpt and wanda prune a block's layers on what the pruned ones before them write"
    )

    @field_validator("sparsity", "blocks", "couple", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, (int, float, Pattern)) and not isinstance(value, bool) else value

    @field_validator("only", "skip", mode="before")
    @classmethod
    def _names_as_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("sparsity")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        return str(parse_pattern(value))

    @field_validator("method", "solver")
    @classmethod
    def _is_known(cls, value: str | None, info: ValidationInfo) -> str | None:
        known = METHODS if info.field_name == "method" else SOLVERS
        if value is not None and value not in known:
            raise InvalidSetting(f"`{info.field_name}` is unknown: got {value!r}. {nearest(value, known)}")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        if self.method != "sparsellm":
            foreign = [name for name in _ONLY_SPARSELLM if name in self.model_fields_set and self._differs(name)]
            if foreign:
                raise InvalidSetting(f"`{foreign[0]}` belongs to the method sparsellm, got the method {self.method}.")
        elif self.as_published:
            foreign = [name for name in _ONLY_DEFAULT if name in self.model_fields_set and self._differs(name)]
            if foreign:
                name = foreign[0]
                raise InvalidSetting(
                    f"`{name}` is {getattr(self, name)}, which Algorithm 1 as published lacks. Leave it out, or --as-published."
                )
        elif self.couple not in (None, *COUPLES):
            raise InvalidSetting(
                f"`couple` is unknown: got {self.couple!r}. {nearest(str(self.couple), COUPLES)} "
                "A list of blocks goes with --as-published."
            )
        if self.true_sequential and self.method in ("sparsellm", "magnitude"):
            why = "looks at no inputs" if self.method == "magnitude" else "has an order of its own"
            raise InvalidSetting(
                f"`true_sequential` is for alps, swift, sparsegpt and wanda, got the method {self.method}, which {why}. "
                "Leave it out."
            )
        if self.couple == "none" and self.newton not in (0, NEWTON):
            raise InvalidSetting("With `couple` none every layer is a problem of its own: leave out `newton`.")
        if self.sharing in ALLOCATIONS[1:] and not isinstance(self.pattern, Unstructured):
            raise InvalidSetting(
                f"`allocation` {self.sharing} shares out an unstructured sparsity, got {self.sparsity}. "
                "Use --allocation uniform, or a YAML file that names each layer's pattern."
            )
        least, most = self.bounds
        if self.allocation_bounds is not None and self.sharing not in ALLOCATIONS[1:]:
            raise InvalidSetting(
                "`allocation_bounds` go with `allocation` fisher, error, owl or dlp. A file names each layer's own."
            )
        if isinstance(self.pattern, Unstructured) and not least <= self.pattern.sparsity <= most:
            raise InvalidSetting(f"`allocation_bounds` are {self.allocation_bounds}, which leaves out {self.sparsity} itself.")
        if self.reads_text and self.calibration is None:
            needing = f"The method {self.method}" if self.method != "magnitude" else f"`allocation` {self.sharing}"
            raise InvalidSetting(f"{needing} {_NEEDS_TEXT}")
        return self

    def _differs(self, name: str) -> bool:
        """Whether a field was set to something else than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @field_validator("allocation")
    @classmethod
    def _is_rule(cls, value: str | None) -> str | None:
        if value is not None and value not in ALLOCATIONS and not value.endswith((".yaml", ".yml")):
            raise InvalidSetting(f"`allocation` is unknown: got {value!r}. {nearest(value, ALLOCATIONS)} Or name a .yaml file.")
        return value

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest sparsity of a layer whose share is chosen."""
        if self.allocation_bounds is None:
            return 0.0, 1.0
        words = self.allocation_bounds.split(":")
        found = [parse_pattern(word) for word in words] if len(words) == 2 else []
        if len(found) != 2 or not isinstance(found[0], Unstructured) or not isinstance(found[1], Unstructured):
            raise InvalidSetting(f"`allocation_bounds` must be two sparsities, as 60%:95%, got {self.allocation_bounds!r}.")
        return found[0].sparsity, found[1].sparsity

    @property
    def pattern(self) -> Pattern:
        """What `sparsity` means."""
        return parse_pattern(self.sparsity)

    @property
    def sharing(self) -> str:
        """The rule by which the sparsity is shared out, or the path of a file."""
        shares = self.method == "sparsellm" and not self.as_published and isinstance(self.pattern, Unstructured)
        return self.allocation or ("fisher" if shares else "uniform")

    @property
    def inner(self) -> str:
        """The name of the solver inside SparseLLM."""
        return self.solver or ("sparsegpt" if self.as_published else "thorough")

    def to_method(self, blocks: int) -> BlockMethod:
        """The method that the recipe names. blocks: how many the model has."""
        if self.method != "sparsellm":
            return LayerWise(SOLVERS[self.method](), self.keep_zeros, self.true_sequential)
        solver = SOLVERS[self.inner]()
        if self.as_published:
            couple = None if self.couple in (None, "feedforward") else select_blocks(self.couple, blocks)
            return PublishedSparseLLM(solver, self.rounds, self.alpha, self.beta, couple=couple, keep_zeros=self.keep_zeros)
        return SparseLLM(
            solver=solver,
            targets=self.targets,
            residual=self.residual,
            epochs=self.rounds,
            alpha=self.alpha,
            beta=self.beta,
            curvature=self.curvature,
            horizon=self.horizon,
            newton=self.newton,
            couple="none" if self.couple == "none" else "feedforward",
            keep_zeros=self.keep_zeros,
        )

    @property
    def rounds(self) -> int:
        """SparseLLM's K."""
        return self.epochs or (4 if self.as_published else SparseLLM.epochs)

    @property
    def reads_text(self) -> bool:
        """Whether the run needs calibration windows."""
        return self.method != "magnitude" or self.sharing in ALLOCATIONS[1:]

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return self.written

    def describe(self) -> str:
        """The method and pattern in one line."""
        detail = f" ({'as published, ' if self.as_published else ''}{self.inner} inside, {self.rounds} epochs)"
        if not self.as_published:
            detail = f" ({self.inner} inside, coupled: {self.couple or 'feedforward'})"
        if self.method != "sparsellm":
            detail = " (true-sequential)" if self.true_sequential else ""
        return f"{self.method}{detail}, {self.pattern.describe()}"


class RecoveryRecipe(RunRecipe):
    """Everything that decides the result of a recovery. model: the dense model that the pruned one is trained toward."""

    pruned: str = Field(description="folder that a run of prune or recover wrote")
    scope: Literal["block", "model"] = Field("model", description="what is trained as one: each block, or the whole model")
    steps: int | None = Field(None, gt=0, description="gradient steps; default: 100 over each block, 300 over the model")
    written: int | None = Field(
        None,
        ge=0,
        description="windows that the dense model writes besides; default: 0 for blocks; as many as are read about twice",
    )

    @model_validator(mode="after")
    def _has_text(self) -> RecoveryRecipe:
        if self.calibration is None:
            raise InvalidSetting(f"Recovery {_NEEDS_TEXT}")
        return self

    @property
    def resolved_steps(self) -> int:
        """Gradient steps, over each block or over the model."""
        return self.steps or SCOPE_STEPS[self.scope]

    @property
    def block_steps(self) -> int:
        """Gradient steps over each block; 0 for none."""
        return self.resolved_steps if self.scope == "block" else 0

    @property
    def calibration_written(self) -> int:
        """How many calibration windows the dense model writes, besides those of the text."""
        return (self.written or 0) if self.scope == "block" else 0

    @property
    def model_steps(self) -> int:
        """Gradient steps over the whole model; 0 for none."""
        return self.resolved_steps if self.scope == "model" else 0

    @property
    def model_written(self) -> int | None:
        """Windows that the dense model writes for those steps; None for as many as let them read each about twice."""
        return self.written if self.scope == "model" else None

    def describe(self) -> str:
        """What is trained, in one line."""
        trained = "each block" if self.scope == "block" else "the whole model"
        return f"recovered from {PurePath(self.pruned).name} by {self.resolved_steps} gradient steps over {trained}"
