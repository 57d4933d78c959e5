"""What runs and sweeps wrote down about themselves, checked as it is read back: anybody may have changed it since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sparsellm.errors import BadCheckpoint, InvalidSetting, SparseLLMError, printable
from sparsellm.json_files import read_json
from sparsellm.patterns import parse_pattern


def _drawable(value: Any) -> Any:
    """A number as it is; raises ValueError for an integer that arrays and plots cannot hold."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("the integer is too large")
    return value


Finite = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_drawable)]
Number = Finite | Literal["inf", "-inf", "nan"]
"""A figure as `report.strict_json` writes it."""


def _pattern(text: str) -> str:
    """The text of a pattern."""
    parse_pattern(text)
    return text


class _Form(BaseModel):
    """Fields that are read again; later versions may write more."""

    model_config = ConfigDict(strict=True)


class _Figure(_Form):
    value: Number
    standard_error: Finite | None


class _Layer(_Form):
    name: str
    pattern: Annotated[str, AfterValidator(_pattern)]
    zeros: Annotated[int, Field(ge=0)]
    sparsity: Finite
    error: Number


class _Step(_Form):
    step: str
    epoch: Annotated[int, Field(ge=0, lt=2**31)]
    feed_forward_error: Number
    accepted: bool
    after_weights: Number | None


class _Block(_Form):
    index: Annotated[int, Field(ge=0, lt=2**31)]
    name: str
    layers: list[_Layer]
    epochs: list[_Step]
    seconds: Finite
    moved: list[str] = []


class _Digests(_Form):
    files: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    report: str


class _Totals(_Form):
    pruned_layers: int
    sparsity_of_pruned_layers: Finite
    sparsity_of_model: Finite


class _Report(_Form):
    recipe: dict[str, Any]
    environment: dict[str, Any]
    calibration: str
    totals: _Totals
    perplexity: dict[str, dict[str, _Figure]]
    tasks: dict[str, dict[str, _Figure]] | None = None
    samples: dict[str, dict[str, str]] | None = None
    notes: list[str]
    seconds: dict[str, Finite]
    peak_memory_bytes: Finite
    blocks: list[_Block]
    files: list[str] = []
    digests: _Digests | None = None


class _Finished(_Form):
    report: _Report


class _Failed(_Form):
    error: str


class _Cell(_Form):
    labels: dict[str, str]
    recipe: dict[str, Any]


class _Published(_Form):
    source: str
    measure: str
    figures: list[Annotated[list[Any], Field(min_length=2, max_length=2)]]


class _Sweep(_Form):
    title: str
    note: str
    axes: dict[str, list[str]]
    columns: str | None
    keep: bool
    smoke: bool
    cells: list[_Cell]
    published: list[_Published]

    @model_validator(mode="after")
    def _columns_is_an_axis(self) -> _Sweep:
        if self.columns is not None and self.columns not in self.axes:
            raise ValueError("`columns` names no axis")
        return self


_FORMS: Mapping[str, type[_Form]] = {
    "report of a run": _Report,
    "finished cell of a sweep": _Finished,
    "failed cell of a sweep": _Failed,
    "sweep": _Sweep,
}


def saved_report(file: Path) -> dict[str, Any]:
    """A run's report; raises BadCheckpoint for one that is not as a run writes it."""
    return _read(file, "report of a run", BadCheckpoint)


def read_finished(file: Path) -> dict[str, Any]:
    """A cell's file of its result, with `report`; raises InvalidSetting for one that is not as a sweep writes it."""
    return _read(file, "finished cell of a sweep", InvalidSetting)


def read_failed(file: Path) -> dict[str, Any]:
    """A cell's file of its failure, with `error`; raises InvalidSetting for one that is not as a sweep writes it."""
    return _read(file, "failed cell of a sweep", InvalidSetting)


def read_saved_sweep(file: Path) -> dict[str, Any]:
    """A sweep's own file; raises InvalidSetting for one that is not as a sweep writes it."""
    return _read(file, "sweep", InvalidSetting)


def _read(file: Path, form: str, refusal: type[SparseLLMError]) -> dict[str, Any]:
    """The content of a file that has the form."""
    content: dict[str, Any] = read_json(file, refusal)
    try:
        _FORMS[form].model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        got = printable(repr(first["input"]), 80)
        raise refusal(f"{file} is damaged: it is not a {form} ({where}: {first['msg']}, got {got}).") from None
    return content
