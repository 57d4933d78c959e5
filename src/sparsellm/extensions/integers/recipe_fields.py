"""The fields by which a recipe rounds weights: `bits`, or `values` with `group_size`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat, IntegerName
from sparsellm.recipes.fields import FurtherFields, layers_option, option

if TYPE_CHECKING:
    from sparsellm.methods import AfterSolve
    from sparsellm.solvers.patterns import Pattern


class IntegerFields(FurtherFields):
    """Fields of a pruning whose kept weights become integers times scales."""

    in_place_of_sparsity: ClassVar[tuple[str, ...]] = ("bits",)

    bits: float | None = option(None, "Stored bits a weight, in place of sparsity.", gt=0, allow_inf_nan=False)
    values: IntegerName | None = option(None, "Round the kept weights to integers.")
    group_size: int | None = layers_option(
        None,
        "With values: columns that share a scale, a multiple of 64; 0 for whole rows.",
        "whole rows for int8, about 128 kept weights for int4 and int3",
        essential=False,
        least=0,
        multiple_of=MASK_WORD,
    )

    @model_validator(mode="before")
    @classmethod
    def _check_bits(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("bits") is not None:
            for name in ("values", "group_size"):
                if fields.get(name) is not None:
                    raise InvalidSetting(
                        f"`bits` sets the values of each layer, so that `{name}` has no place. Leave out one of the two."
                    )
        return fields

    @model_validator(mode="after")
    def _check_values(self) -> IntegerFields:
        if self.values is None and self.group_size is not None:
            raise InvalidSetting("`group_size` goes with `values`. Pass `values` too, or leave it out.")
        return self

    @property
    def projecting(self) -> str:
        return "values" if self.values else "bits" if self.bits is not None else super().projecting

    def size_label(self) -> str:
        return super().size_label() if self.bits is None else f"{self.bits:g} bits a weight"

    def describe_more(self) -> str:
        return super().describe_more() + (f", values {self.values}" if self.values else "")

    def after_solve(self, pattern: Pattern) -> AfterSolve | None:
        """The integers that weights are rounded to with `values`; those of `bits` are set by its allocation rule."""
        if self.values is None:
            return super().after_solve(pattern)
        from sparsellm.extensions.integers.quantization import (
            IntegerValues,  # imports torch, which the command line does without
        )

        return IntegerValues(IntegerFormat.parse(self.values, self.group_size, 1 - pattern.sparsity))

    def check_source(self, source: Any) -> None:
        """Raise InvalidSetting for a checkpoint that is rounded already."""
        super().check_source(source)
        if self.values and source.folder is not None:
            from sparsellm.extensions.integers.scales_file import check_unrounded, read_scales

            check_unrounded(source.name, read_scales(source.folder))
