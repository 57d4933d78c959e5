"""What layers are rounded to."""

from __future__ import annotations

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import IntegerValues
from sparsellm.methods.layerwise import LayerWise
from sparsellm.solvers.scores import Magnitude


def test_formats_are_of_all_layers_or_of_each() -> None:
    common, own = IntegerFormat(4, 128), {"a": IntegerFormat(8, 0), "b": IntegerFormat(3, 64)}
    assert [IntegerValues(common).of(name) for name in own] == [common, common]
    assert [IntegerValues(by_layer=own).of(name) for name in own] == list(own.values())


def test_a_method_is_shown_as_in_earlier_reports() -> None:
    method = LayerWise(Magnitude(), after_solve=IntegerValues(IntegerFormat(4, 128)))
    assert repr(method) == "LayerWise(solver=Magnitude(), keep_zeros=False, after_solve=IntegerValues(bits=4, group_size=128))"
