"""The fields of a recipe, each with its type, default and description; the command line generates its options from them.

Imports no torch, so that `sparsellm --help` and shell completion need not wait for torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from sparsellm.errors import InvalidSetting, first_line
from sparsellm.extension import PROBLEMS, check_plugins, installed
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES

if TYPE_CHECKING:
    from sparsellm.methods import AfterSolve
    from sparsellm.solvers.patterns import Pattern

SolverName = Literal["alps-accurate", "alps", "fast-admm", "sparsegpt", "wanda", "magnitude"]
MethodName = Literal["sparsellm", "algorithm1", SolverName]

METHODS = {
    "sparsellm": "matches layers to the dense model's outputs, weighted by their effect on the predictions; any solver inside",
    "algorithm1": "Algorithm 1 of the SparseLLM paper: weights and auxiliary signals in turn (NeurIPS 2024)",
    "alps-accurate": "ALPS with over-relaxation, a penalty that grows half as fast, and a longer final fit",
    "alps": "finds mask and weights together by ADMM, then refits the weights on the mask (NeurIPS 2024)",
    "fast-admm": "the first ADMM steps of ALPS with a single factorization, and a short refit",
    "sparsegpt": "removes the cheapest weights column by column and updates later columns to compensate (ICML 2023)",
    "wanda": "keeps the largest |weight| times input norm in each row, values unchanged (ICLR 2024)",
    "magnitude": "keeps the largest weights, without calibration text",
}
"""The methods of sparsellm, each with a description."""

ALLOCATIONS = ("uniform", "owl", "fisher")
"""Rules that set each layer's sparsity; a YAML file may be used instead."""

Trait = Literal["path", "measured", "machine", "memory"]
"""The kind of a field: a file's name ("path"), something to measure, which changes no weights ("measured"), a matter of the
machine and not of the result ("machine"), or of its memory or its modules, on which no bit depends ("memory")."""

EVALUATION = (
    *("revision", "trust_remote_code", "text_field", "documents", "bos", "sequence_length", "evaluate_limit"),
    *("task", "task_data", "task_limit", "max_memory", "offload", "device", "dtype"),
)
"""Fields that `evaluate` takes."""

MOST = 2**31 - 1
"""Largest value of every count: the product of two fits the integers of torch."""

_SIZE = TypeAdapter(ByteSize)


def parse_size(field: str, value: str) -> int:
    """The bytes of a size such as 16GiB. Raises InvalidSetting, which names the field."""
    with suppress(ValidationError):
        # ByteSize accepts malformed sizes, for example it reads "1,5GiB" as one byte.
        if re.fullmatch(r"\s*\d*\.?\d+\s*[a-zA-Z]+\s*", value) and 0 < (size := _SIZE.validate_python(value)) < 2**63:
            return size
    raise InvalidSetting(f"`{field}` must be a size such as 16GiB or 500MB, got {value!r}.")


def select_blocks(text: str, count: int) -> frozenset[int]:
    """Parse a selection of blocks.

    Args:
        text: "all", "none", "first-half", or a list of numbers and half-open ranges such as "0:12,15"; negative numbers count
            from the end, as in "-1" or "-4:". "first-half" is the first `count // 2` blocks, as in the paper's tables.
        count: Number of blocks of the model.

    Raises:
        InvalidSetting: The text is malformed, or holds an empty range or a block that the model does not have.
    """
    named = {"all": range(count), "none": range(0), "first-half": range(count // 2)}
    if text in named:
        return frozenset(named[text])
    chosen: set[int] = set()
    for part in text.split(","):
        if match := re.fullmatch(r"\s*(-?\d{1,9})?:(-?\d{1,9})?\s*", part):
            start, stop = int(match[1] or 0), count if match[2] is None else int(match[2])
        else:
            start = int(part) if re.fullmatch(r"\s*-?\d{1,9}\s*", part) else count  # which no block has
            stop = start + 1 or count
        start, stop = (number + count if number < 0 else number for number in (start, stop))
        if not 0 <= start < stop <= count:
            raise InvalidSetting(
                f"`blocks` got {text!r}, but the model's {count} blocks are 0 to {count - 1}, or -{count} to -1 from the end. "
                "Write all, first-half, none, a range 0:12, which ends before 12, or a list 3,5."
            )
        chosen.update(range(start, stop))
    return frozenset(chosen)


def split_name(value: Any, field: str) -> tuple[Any, dict[str, Any]]:
    """A name, and the settings beside it in a mapping. field: where it stands, for the error."""
    if not isinstance(value, Mapping):
        return value, {}
    if "name" not in value:
        raise InvalidSetting(f"`{field}` has settings and no name: got {dict(value)}.")
    return value["name"], {str(key): x for key, x in value.items() if key != "name"}


def written(value: Any) -> str:
    """A value as YAML has it: true rather than True; a name with settings as `label_with`."""
    if isinstance(value, Mapping) and "name" in value:
        return label_with(*split_name(value, ""))
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def label_with(name: str, settings: Mapping[str, Any]) -> str:
    """A name with its settings, as "ria(power=1.0)"."""
    return name + (f"({', '.join(f'{key}={written(x)}' for key, x in settings.items())})" if settings else "")


_as_tuple = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Names = Annotated[tuple[str, ...], _as_tuple]
"""Several texts; a single one may be written without a list."""


def _field(
    panel: str,
    default: Any,
    description: str,
    default_text: str | None = None,
    *,
    essential: bool = True,
    least: int | None = None,
    traits: tuple[Trait, ...] = (),
    spelled: str = "",
    **constraints: Any,
) -> Any:
    """A field of the recipe.

    Args:
        panel: The panel of the help that lists the option, of `HELP_PANELS`.
        default: The value of a field that is not given; `...` of one that must be given.
        description: The help text, one sentence.
        default_text: What is used when the value is None, in words.
        essential: `--help` lists the option, not only `--help-all`.
        least: Smallest value of a count, whose largest is `MOST`.
        traits: What other modules ask of the field, by `fields_with`.
        spelled: Name of the option, if it is another one than the field's.
        **constraints: Bounds of the value, as in `pydantic.Field`.
    """
    constraints |= {} if least is None else {"ge": least, "le": MOST}
    option: dict[str, Any] = {"panel": panel, "default_text": default_text, "essential": essential}
    option |= {"traits": traits, "spelled": spelled}
    return Field(default, description=description, json_schema_extra=option, **constraints)


HELP_PANELS = ("Options", "Layers", "Machine", "Method", "Data", "Evaluation", "Model")
"""Panels of the help, in its order. A function for each makes a field whose option the panel lists."""

option = partial(_field, "Options")
layers_option = partial(_field, "Layers")
_machine = partial(_field, "Machine")
method_option = partial(_field, "Method", essential=False)
_data = partial(_field, "Data", essential=False)
_evaluation = partial(_field, "Evaluation", essential=False)
_model = partial(_field, "Model", essential=False)


CONFIG = ConfigDict(extra="forbid", frozen=True, defer_build=True)

SAVED: dict[str, Any] = {"saved": True}
"""Context of the validation of a recipe that a report holds, whose names may be those of packages that are not installed."""


class RunFields(BaseModel):
    """The fields that `prune` and `recover` share."""

    model_config = CONFIG

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """The fields that `repr` and `str` show: none at their defaults, of which a recipe has some forty."""
        shown = self.changed()
        yield from ((name, value) for name, value in super().__repr_args__() if name in shown)

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and the method, as plain data."""
        declared = type(self).model_fields.items()
        defaults = {name: [] if field.default == () else field.default for name, field in declared if name != "method"}
        return {name: x for name, x in self.model_dump(mode="json").items() if name not in defaults or x != defaults[name]}

    model: str = option(..., "Checkpoint folder, Hugging Face name, demo:opt or demo:llama.", traits=("path",))
    revision: str | None = _model(None, "Branch, tag or commit of a model on the hub.")
    trust_remote_code: bool = _model(False, "Run the Python code that comes with the checkpoint.")

    calibration: str | None = option(None, f"Text: {', '.join(TEXT_NAMES)}, or a {TEXT_FILES} file.", traits=("path",))
    text_field: str | None = _data(
        None,
        "Field that holds the texts or chats in .csv, .json, .jsonl and .parquet files.",
        "text, messages, conversations, prompt with completion, or instruction with output",
    )
    documents: Literal["auto", "whole", "joined"] = _data(
        "auto",
        "whole: sequences are documents, cut at the length; joined: cut from all documents together; auto: whole for chats.",
    )
    bos: Literal["auto", "yes", "no"] = _data(
        "auto",
        "Begin each sequence with the BOS token; auto: if the tokenizer adds one, except for c4, wikitext2 and ptb with OPT and"
        " LLaMA, which are cut as in the papers.",
    )
    samples: int = option(128, "Number of calibration sequences.", least=1)
    sequence_length: int | None = option(None, "Tokens per sequence.", "2048, or the model's maximum if smaller", least=2)
    seed: int = option(0, "Seed for drawing the sequences.", ge=0, lt=2**63)

    evaluate: Names = option((), "Text to measure perplexity on, as for calibration.", traits=("path", "measured"))
    evaluate_limit: int | None = _evaluation(
        None, "Evaluate at most this many sequences per text.", "256 for c4, otherwise all", least=1, traits=("measured",)
    )
    task: Names = _evaluation(
        (),
        "Task or group of lm-eval to measure on, such as boolq or mmlu, or the .yaml file of a task.",
        traits=("path", "measured"),
    )
    task_data: str | None = _evaluation(
        None,
        "Folder with the questions of the SparseLLM paper's tasks and piqa as .jsonl files.",
        "downloaded from the hub",
        traits=("path", "measured"),
    )
    task_limit: int | None = _evaluation(
        None, "Evaluate at most this many questions per task.", "all", least=1, traits=("measured",)
    )

    max_memory: str | None = _machine(None, "Maximum memory, as 16GiB.", "80% of free", traits=("machine", "memory"))
    offload: bool | None = _machine(
        None, "Load one block at a time.", "when the model needs more than half of the memory", traits=("machine", "memory")
    )
    device: str = _machine("auto", "Device: auto, cpu, cuda:1 or mps.", traits=("machine",))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _machine("auto", "Data type; auto is the stored one.")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = _machine(
        "auto",
        "Data type of matrix products in passes and gradient steps; auto is bfloat16 for bfloat16 models if the processor"
        " is faster with it.",
        essential=False,
    )
    batch_size: int | None = _machine(None, "Sequences per pass.", "about 2,048 tokens", least=1, traits=("machine",))

    plugin: Names = method_option(
        (),
        "Module with methods, steps or patterns to use by name; or MODULE:CLASS, for one of them.",
        traits=("machine", "memory"),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for what is neither; pydantic would read `samples: true` as 1."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[str(info.field_name)].annotation):
            raise InvalidSetting(f"`{info.field_name}` got {str(value).lower()}, which is no value of it.")
        return value

    @field_validator("plugin")
    @classmethod
    def _is_loaded(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.context is not SAVED:
            check_plugins(value, "The recipe")
        return value


class FurtherFields(BaseModel):
    """Base of fields that an extension adds to recipes of `prune`, whose object has the other fields too.

    A method or property that overrides one of these joins its result with that of `super()`.
    """

    model_config = CONFIG

    in_place_of_sparsity: ClassVar[tuple[str, ...]] = ()
    """Fields that set what `sparsity` and `allocation` would. Each has the name of the allocation rule that it stands for."""

    @property
    def projecting(self) -> str:
        """The field by which weights are projected once they are solved, as rounding does; empty if none is."""
        return ""

    def size_label(self) -> str:
        """A label of the size that one of `in_place_of_sparsity` asks for; empty without it."""
        return ""

    def describe_more(self) -> str:
        """The end of the description of a run, after a comma; may be empty."""
        return ""

    def after_solve(self, pattern: Pattern) -> AfterSolve | None:
        """The projection of each solved weight; None without one. pattern: that of the recipe."""
        return None

    def further_steps(self) -> tuple[str, ...]:
        """Names of steps after the blocks, as `Extension.steps` has them."""
        return ()

    def check_source(self, source: Any) -> None:
        """Raise InvalidSetting for a model, a `Checkpoint` or `InMemoryModel`, that the fields are not for."""


class PruneFields(RunFields, FurtherFields):
    """The fields of `sparsellm.recipes.recipe.Recipe`, which checks that they agree, without those of extensions."""

    method: MethodName | str = option("sparsellm", "Pruning method; sparsellm info lists them.")
    sparsity: str | None = option(None, "Fraction to remove (70%, 0.7), or N:M for N of every M; several as 50%,60%.", "50%")
    settings: dict[str, Any] = method_option(
        {}, "Setting of the method; sparsellm info METHOD lists them.", spelled="set", validate_default=True
    )
    then: tuple[str | dict[str, Any], ...] = method_option(
        (), "Step for the whole model after its blocks, by name; with settings as '{name: NAME, SETTING: VALUE}'."
    )
    effort: Literal["fast", "standard", "best"] = option(
        "standard",
        "fast prunes each layer alone; standard solves each feed-forward part as one problem; best also trains the model.",
    )
    allocation: str | None = layers_option(
        None,
        "Rule that sets each layer's sparsity: uniform, owl, fisher, or a YAML file.",
        "fisher for the method sparsellm, uniform for others and N:M",
        traits=("path",),
    )
    blocks: str = layers_option("all", "Decoder blocks to prune: all, first-half, a range 0:12, a list 3,-1.")
    include: Names = layers_option((), "Prune only layers of this name, glob, re:REGEX or type.")
    exclude: Names = layers_option((), "Do not prune layers of this name, glob, re:REGEX or type.")
    keep_zeros: bool = layers_option(False, "Keep weights that are zero in the dense model at zero.", essential=False)

    @field_validator("then", mode="before")
    @classmethod
    def _split_steps(cls, value: Any) -> Any:
        """Take one step for several, and read texts of the command line."""
        if isinstance(value, bool):
            return value
        several = () if value is None else value if isinstance(value, (list, tuple)) else [value]
        return [_read(x) if isinstance(x, str) and x.startswith("{") else x for x in several]

    @model_validator(mode="before")
    @classmethod
    def _split_method(cls, fields: Any) -> Any:
        """Take settings from beside the name of the method, and from texts NAME=VALUE."""
        if not isinstance(fields, dict):
            return fields
        settings = fields.get("settings") or {}
        if isinstance(settings, (list, tuple)):
            settings = dict(_parse_setting(text) for text in settings)
        if isinstance(fields.get("method"), Mapping):
            name, beside = split_name(fields["method"], "method")
            fields, settings = fields | {"method": name}, beside | dict(settings)
        return fields | ({"settings": settings} if settings else {})

    @model_validator(mode="before")
    @classmethod
    def _has_sparsity(cls, fields: Any) -> Any:
        """Set the default sparsity unless another field sets what it would."""
        if not isinstance(fields, dict):
            return fields
        setting = next((name for name in cls.in_place_of_sparsity if fields.get(name) is not None), None)
        if setting is None:
            return fields | ({"sparsity": "50%"} if fields.get("sparsity") is None else {})
        for name in ("sparsity", "allocation"):
            if fields.get(name) is not None:
                raise InvalidSetting(
                    f"`{setting}` sets each layer's sparsity, so that `{name}` has no place. Leave out one of the two."
                )
        return fields


BROUGHT_BY: dict[str, str] = {}
"""The package, with its version, of each field that another package brings."""


def _with_extensions() -> type[PruneFields]:
    """The fields with those that extensions add; one whose name is taken leaves its extension's out."""
    brought: list[type[FurtherFields]] = []
    taken = set(PruneFields.model_fields)
    for extension in installed():
        for value in extension.extension.fields.get("prune", ()):
            try:
                kind = extension.load(value)
                if both := taken & kind.model_fields.keys():
                    raise InvalidSetting(f"{min(both)!r} is a field already")
            except (InvalidSetting, AttributeError) as error:
                PROBLEMS.append(f"the fields {value} of the package {extension.package} are left out: {first_line(error)}")
                continue
            taken |= kind.model_fields.keys()
            brought.append(kind)
            if extension.package != __package__.partition(".")[0]:
                BROUGHT_BY.update(dict.fromkeys(kind.model_fields, f"{extension.package} {extension.version}"))
    bases: Any = (*brought, PruneFields)
    return cast("type[PruneFields]", create_model("RecipeFields", __base__=bases, __module__=__name__))


if TYPE_CHECKING:
    RecipeFields = PruneFields
else:
    RecipeFields = _with_extensions()


def fields_with(kind: type[RunFields], *traits: Trait) -> tuple[str, ...]:
    """Return the names of the fields of a recipe's class that have one of these traits."""
    options = [(name, cast("dict[str, Any]", field.json_schema_extra or {})) for name, field in kind.model_fields.items()]
    return tuple(name for name, option in options if not {*traits}.isdisjoint(option.get("traits", ())))


def _parse_setting(text: Any) -> tuple[str, Any]:
    """The name and the value of a setting of the command line."""
    name, equals, value = str(text).partition("=")
    if not equals:
        raise InvalidSetting(f"`settings` must be NAME=VALUE, got {str(text)!r}.")
    return name, _read(value)


def _read(text: str) -> Any:
    """A value as in a YAML file."""
    from sparsellm.texts.yaml_files import read_value  # imports PyYAML, which `--help` needs not

    return read_value(text)
