"""A whole run as validated data, to and from YAML; and the tables of methods and solvers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from sparsellm.allocation import select_blocks
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.methods import BlockMethod
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.patterns import Pattern, parse_pattern
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.criteria import Magnitude, Wanda
from sparsellm.solvers.sparsegpt import SparseGPT

SOLVERS: dict[str, type[LayerSolver]] = {"magnitude": Magnitude, "wanda": Wanda, "sparsegpt": SparseGPT, "alps": ALPS}
"""Every layer solver by its name on the command line; each is also a layer-wise method of that name."""

METHODS = {
    "sparsellm": "couples the feed-forward layers of a block through auxiliary signals; any solver inside (NeurIPS 2024)",
    "alps": "searches mask and weights together by ADMM, then fits the weights on the mask (NeurIPS 2024)",
    "sparsegpt": "removes what costs least, column by column, and lets later columns make good (ICML 2023)",
    "wanda": "keeps the largest weight times input size in each row; values unchanged (ICLR 2024)",
    "magnitude": "keeps the largest weights; needs no text",
}
"""Every method by its name on the command line, in words."""

_ONLY_SPARSELLM = ("as_published", "solver", "epochs", "alpha", "beta", "couple")


class Recipe(BaseModel):
    """Everything that decides a run's result, as on the command line and in YAML. See docs/cli.md for each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="folder of a checkpoint, a hub name, or demo:opt or demo:llama")
    method: str = Field("sparsellm", description="what prunes a block: sparsellm, alps, sparsegpt, wanda or magnitude")
    as_published: bool = Field(False, description="SparseLLM's Algorithm 1: SparseGPT inside, the last epoch returned")
    solver: str | None = Field(None, description="the solver inside SparseLLM: alps, sparsegpt, wanda or magnitude")
    sparsity: str = Field("50%", description="share of weights removed, or N:M: N of every M removed")
    calibration: str | None = Field(None, description="file of text, or c4, wikitext2, ptb, demo")
    text_field: str | None = Field(None, description="field of the text in .json, .jsonl and .parquet; default: text")
    samples: int = Field(64, gt=0, description="calibration windows")
    length: int | None = Field(None, gt=1, description="tokens a window; default: 2048, or the model's length if less")
    epochs: int = Field(4, gt=0, description="SparseLLM's K")
    alpha: float = Field(0.1, gt=0, allow_inf_nan=False, description="SparseLLM's weight of fitting the layers")
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="SparseLLM's weight of fitting the activation")
    couple: str = Field("feedforward", description="SparseLLM's Omega: feedforward, none, or blocks as in `blocks`")
    blocks: str = Field("all", description="all, first-half, a range 0:12, or a list 3,5")
    only: tuple[str, ...] = Field((), description="prune only layers of these names; * stands for anything")
    skip: tuple[str, ...] = Field((), description="leave out layers of these names")
    seed: int = Field(0, ge=0, lt=2**63, description="of the calibration windows")
    batch: int | None = Field(None, gt=0, description="windows at a time; default: about 4,096 tokens")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of the model; auto: as stored")
    evaluate: tuple[str, ...] = Field((), description="texts to measure the perplexity on, before and after")

    @field_validator("sparsity", "blocks", "couple", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, (int, float, Pattern)) and not isinstance(value, bool) else value

    @field_validator("only", "skip", "evaluate", mode="before")
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
        if self.method != "magnitude" and self.calibration is None:
            raise InvalidSetting(
                f"The method {self.method} needs a calibration text: pass --calibration with a .txt, .json, .jsonl or .parquet "
                "file, or one of c4, wikitext2, ptb, demo."
            )
        return self

    def _differs(self, name: str) -> bool:
        """Whether a field was set to something else than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def pattern(self) -> Pattern:
        """What `sparsity` means."""
        return parse_pattern(self.sparsity)

    @property
    def inner(self) -> str:
        """The name of the solver inside SparseLLM."""
        return self.solver or ("sparsegpt" if self.as_published else "alps")

    def to_method(self, blocks: int) -> BlockMethod:
        """The method that the recipe names. blocks: how many the model has."""
        if self.method != "sparsellm":
            return LayerWise(SOLVERS[self.method]())
        couple = None if self.couple == "feedforward" else select_blocks(self.couple, blocks)
        return SparseLLM(
            solver=SOLVERS[self.inner](),
            epochs=self.epochs,
            alpha=self.alpha,
            beta=self.beta,
            couple=couple,
            keep_best=not self.as_published,
        )

    def describe(self) -> str:
        """The method and pattern in one line."""
        detail = f" ({'as published, ' if self.as_published else ''}{self.inner} inside, {self.epochs} epochs)"
        return f"{self.method}{detail if self.method == 'sparsellm' else ''}, {self.pattern.describe()}"

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_recipe(settings: Mapping[str, Any], config: str | Path | None = None) -> Recipe:
    """A recipe from settings, over those of a YAML file if there is one.

    Raises InvalidSetting that names the field, what it got, and the nearest right name.
    """
    merged: dict[str, Any] = {}
    if config is not None:
        merged.update(read_yaml(Path(config)))
    merged.update(settings)
    if "model" not in merged:
        raise InvalidSetting("There is no model: name one on the command line, or as `model:` in the recipe.")
    try:
        return Recipe(**merged)
    except ValidationError as error:
        raise InvalidSetting(_explain(error.errors()[0])) from None


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without numbers to the base 60: `sparsity: 2:4` is a pattern, not 124."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), list("-+0123456789"))
_NUMBER = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a recipe file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"The recipe {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise InvalidSetting(f"The recipe {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise InvalidSetting(f"The recipe {path} must hold `field: value` lines, got {type(content).__name__}.")
    for key in content:
        if str(key) not in Recipe.model_fields:
            raise InvalidSetting(
                f"The recipe {path} has an unknown field {str(key)!r}. {nearest(str(key), Recipe.model_fields)}"
            )
    return content


def _explain(error: Any) -> str:
    """One sentence or two for pydantic's first complaint."""
    own = (error.get("ctx") or {}).get("error")
    if isinstance(own, InvalidSetting):
        return str(own)
    field = str(error["loc"][0]) if error["loc"] else "recipe"
    if error["type"] == "extra_forbidden":
        return f"Unknown field {field!r}. {nearest(field, Recipe.model_fields)}"
    if error["type"] == "literal_error":
        known = [word.strip("' ") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"`{field}` is unknown: got {error['input']!r}. {nearest(str(error['input']), known)}"
    return f"`{field}`: {error['msg'].lower()}, got {error['input']!r}."
