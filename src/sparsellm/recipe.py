"""A whole run as validated data, to and from YAML."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError, field_validator, model_validator

from sparsellm.allocation import select_blocks
from sparsellm.choices import ALLOCATIONS, COUPLES, SOLVERS
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.published import PublishedSparseLLM
from sparsellm.methods.settings import Window
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import Pattern, Unstructured, parse_pattern
from sparsellm.recipe_fields import RecipeFields, SolverName

_ONLY_DEFAULT = ("targets", "residual", "curvature", "horizon", "newton", "refine", "couple_steps", "couple_written")
_ONLY_SPARSELLM = ("as_published", "solver", "epochs", "alpha", "beta", "couple", *_ONLY_DEFAULT)

_SIZE = TypeAdapter(ByteSize)

BLOCK_STEPS = 100
"""The usual gradient steps over a block, where it is to be coupled."""


class Recipe(RecipeFields):
    """Everything that decides a run's result, as on the command line and in YAML. See docs/cli.md for each field."""

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
        if self.couple == "none" and ((self.newton and self._differs("newton")) or self.refine):
            raise InvalidSetting("With `couple` none every layer is a problem of its own: leave out `newton` and `refine`.")
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

    @field_validator("memory")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is None:
            return value
        with suppress(ValidationError):
            # ByteSize ignores what follows a unit, so that it reads "1,5GiB" as one byte.
            if re.fullmatch(r"\s*\d*\.?\d+\s*[a-zA-Z]+\s*", value) and 0 < _SIZE.validate_python(value) < 2**63:
                return value
        raise InvalidSetting(f"`memory` must be a size such as 16GiB or 500MB, got {value!r}.")

    @property
    def memory_bytes(self) -> int | None:
        """What `memory` means, in bytes."""
        return None if self.memory is None else _SIZE.validate_python(self.memory)

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
    def inner(self) -> SolverName:
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
            refine=replace(SparseLLM.refine, steps=self.steps),
            couple=self.window,
            keep_zeros=self.keep_zeros,
        )

    @property
    def rounds(self) -> int:
        """SparseLLM's K."""
        return self.epochs or (4 if self.as_published else SparseLLM.epochs)

    @property
    def steps(self) -> int:
        """Gradient steps over each block."""
        return self.refine if self.refine is not None else (BLOCK_STEPS if self.couple == "block" else 0)

    @property
    def window(self) -> Window:
        """The largest problem within a block; the whole model's stage comes after the blocks."""
        words: dict[str | None, Window] = {"none": "none", None: "feedforward", "feedforward": "feedforward"}
        return words.get(self.couple, "block")

    def describe(self) -> str:
        """The method and pattern in one line."""
        detail = f" ({'as published, ' if self.as_published else ''}{self.inner} inside, {self.rounds} epochs)"
        if not self.as_published:
            detail = f" ({self.inner} inside, coupled: {self.couple or 'feedforward'})"
        if self.method != "sparsellm":
            detail = " (true-sequential)" if self.true_sequential else ""
        return f"{self.method}{detail}, {self.pattern.describe()}"

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
