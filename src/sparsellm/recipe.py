"""A whole run as validated data, to and from YAML."""

from __future__ import annotations

from dataclasses import replace
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
from sparsellm.methods.settings import Window
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import Pattern, Unstructured, parse_pattern

_ONLY_DEFAULT = ("effort", "newton", "refine", "couple_steps", "couple_written")
_ONLY_PUBLISHED = ("epochs", "alpha", "beta")
_ONLY_SPARSELLM = ("as_published", "solver", "couple", *_ONLY_PUBLISHED, *_ONLY_DEFAULT)

EFFORTS: dict[str, tuple[str, str]] = {"fast": ("swift", "none"), "standard": ("thorough", "feedforward")}
"""By the name of an effort, the solver and the coupling where the recipe names none."""

NEWTON = SparseLLM.newton
"""The usual number of Gauss-Newton rounds."""

BLOCK_STEPS = 100
"""The usual gradient steps over a block, where it is to be coupled."""


class Recipe(BaseModel):
    """Everything that decides a run's result, as on the command line and in YAML. See docs/cli.md for each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="folder of a checkpoint, a hub name, or demo:opt or demo:llama")
    revision: str | None = Field(None, description="of a hub name: a branch, tag or commit")
    trust_remote_code: bool = Field(False, description="run code that the checkpoint brings")
    architecture: str | None = Field(
        None, description="YAML that describes a model's form; default: the table, or what is found"
    )
    method: str = Field(
        "sparsellm", description="what prunes a block: sparsellm, thorough, alps, swift, sparsegpt, wanda or magnitude"
    )
    as_published: bool = Field(False, description="SparseLLM's Algorithm 1: SparseGPT inside, the last epoch returned")
    effort: Literal["fast", "standard"] = Field(
        "standard",
        description="fast: SparseLLM layer by layer, swift inside, 1.3 times the runtime of llm-compressor's SparseGPT; "
        "standard: feed-forward parts coupled, thorough inside, 13 times; `solver` and `couple` win over it",
    )
    solver: str | None = Field(
        None,
        description="the solver inside SparseLLM: thorough, alps, swift, sparsegpt, wanda or magnitude; default: by `effort`",
    )
    sparsity: str = Field("50%", description="share of weights removed, or N:M: N of every M removed")
    calibration: str | None = Field(None, description="file of text, or c4, wikitext2, ptb, demo")
    text_field: str | None = Field(None, description="field of the text in .json, .jsonl and .parquet; default: text")
    samples: int = Field(128, gt=0, description="calibration windows")
    written: int = Field(0, ge=0, description="calibration windows more, that the dense model writes itself")
    length: int | None = Field(None, gt=1, description="tokens a window; default: 2048, or the model's length if less")
    newton: int = Field(NEWTON, ge=0, description="Gauss-Newton rounds over a feed-forward part, masks held")
    refine: int | None = Field(
        None,
        ge=0,
        description="gradient steps over a block, masks held, stopped by held-back windows; default: 100 with couple: block",
    )
    epochs: int = Field(PublishedSparseLLM.epochs, gt=0, description="Algorithm 1's K")
    alpha: float = Field(
        PublishedSparseLLM.alpha, gt=0, allow_inf_nan=False, description="Algorithm 1's weight of fitting the layers"
    )
    beta: float = Field(
        PublishedSparseLLM.beta, gt=0, allow_inf_nan=False, description="Algorithm 1's weight of fitting the activation"
    )
    couple: str | None = Field(None, description="SparseLLM's Omega: none, feedforward, block or model; default: by `effort`")
    couple_steps: int = Field(300, gt=0, description="gradient steps of the whole model's stage, with couple: model")
    couple_written: int | None = Field(
        None,
        ge=0,
        description="windows that the dense model writes for that stage; default: as many as let it read each about twice",
    )
    allocation: str | None = Field(
        None,
        description="how the sparsity is shared: uniform, owl, fisher or a YAML file; default: docs/allocation.md",
    )
    allocation_bounds: str | None = Field(
        None, description="the least and the largest sparsity that owl or fisher may give a layer, as 60%:95%"
    )
    blocks: str = Field("all", description="all, first-half, a range 0:12, or a list 3,5")
    only: tuple[str, ...] = Field((), description="prune only layers of these names; * stands for anything")
    skip: tuple[str, ...] = Field((), description="leave out layers of these names")
    keep_zeros: bool = Field(False, description="weights that are zero already stay zero")
    true_sequential: bool = Field(
        False, description="alps, swift, sparsegpt and wanda prune a block's layers on what the pruned ones before them write"
    )
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

    @field_validator("sparsity", "blocks", "couple", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, (int, float, Pattern)) and not isinstance(value, bool) else value

    @field_validator("only", "skip", "evaluate", "prompt", "task", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
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
            if foreign or self.couple in ("block", "model"):
                name = foreign[0] if foreign else "couple"
                raise InvalidSetting(
                    f"`{name}` is {getattr(self, name)}, which Algorithm 1 as published lacks. Leave it out, or --as-published."
                )
        elif foreign := [name for name in _ONLY_PUBLISHED if self._differs(name)]:
            raise InvalidSetting(
                f"`{foreign[0]}` is {getattr(self, foreign[0])}, which only Algorithm 1 has. "
                "Pass --as-published with it, or leave it out."
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
        if self.resolved_couple == "none" and (self.newton not in (0, NEWTON) or self.refine):
            raise InvalidSetting(
                "With `couple` none, or `effort` fast, every layer is a problem of its own: leave out `newton` and `refine`."
            )
        if self.sharing in ALLOCATIONS[1:] and not isinstance(self.pattern, Unstructured):
            raise InvalidSetting(
                f"`allocation` {self.sharing} shares out an unstructured sparsity, got {self.sparsity}. "
                "Use --allocation uniform, or a YAML file that names each layer's pattern."
            )
        least, most = self.bounds
        if self.allocation_bounds is not None and self.sharing not in ALLOCATIONS[1:]:
            raise InvalidSetting("`allocation_bounds` go with `allocation` owl or fisher. A file names each layer's own.")
        if isinstance(self.pattern, Unstructured) and not least <= self.pattern.sparsity <= most:
            raise InvalidSetting(f"`allocation_bounds` are {self.allocation_bounds}, which leaves out {self.sparsity} itself.")
        if (self.method != "magnitude" or self.sharing in ALLOCATIONS[1:]) and self.calibration is None:
            needing = f"The method {self.method}" if self.method != "magnitude" else f"`allocation` {self.sharing}"
            raise InvalidSetting(
                f"{needing} needs a calibration text: pass --calibration with a .txt, .json, .jsonl or .parquet "
                "file, or one of c4, wikitext2, ptb, demo."
            )
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
        return self.solver or ("sparsegpt" if self.as_published else EFFORTS[self.effort][0])

    @property
    def resolved_couple(self) -> str:
        """Whose layers form one problem, also where the recipe leaves it to `effort`."""
        return self.couple or EFFORTS[self.effort][1]

    def to_method(self, blocks: int) -> BlockMethod:
        """The method that the recipe names. blocks: how many the model has."""
        if self.method != "sparsellm":
            return LayerWise(SOLVERS[self.method](), self.keep_zeros, self.true_sequential)
        solver = SOLVERS[self.inner]()
        if self.as_published:
            couple = None if self.couple in (None, "feedforward") else select_blocks(self.couple, blocks)
            return PublishedSparseLLM(solver, self.epochs, self.alpha, self.beta, couple=couple, keep_zeros=self.keep_zeros)
        return SparseLLM(
            solver=solver,
            newton=self.newton,
            refine=replace(SparseLLM.refine, steps=self.steps),
            couple=self.window,
            keep_zeros=self.keep_zeros,
        )

    @property
    def steps(self) -> int:
        """Gradient steps over each block."""
        return self.refine if self.refine is not None else (BLOCK_STEPS if self.couple == "block" else 0)

    @property
    def window(self) -> Window:
        """The largest problem within a block; the whole model's stage comes after the blocks."""
        words: dict[str, Window] = {"none": "none", "feedforward": "feedforward"}
        return words.get(self.resolved_couple, "block")

    def describe(self) -> str:
        """The method and pattern in one line."""
        detail = f" ({'as published, ' if self.as_published else ''}{self.inner} inside, {self.epochs} epochs)"
        if not self.as_published:
            detail = f" ({self.inner} inside, coupled: {self.resolved_couple})"
        if self.method != "sparsellm":
            detail = " (true-sequential)" if self.true_sequential else ""
        return f"{self.method}{detail}, {self.pattern.describe()}"

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
