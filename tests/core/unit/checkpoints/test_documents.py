"""config.json with a field changed: every other byte stays."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsellm.checkpoints.documents import members, with_dtype, with_member, without_member

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)


@given(OBJECTS, st.sampled_from([None, 1, 2]), st.booleans(), VALUES)
def test_a_member_is_added_replaced_and_removed(fields: dict, indent: int | None, ascii_only: bool, value: object) -> None:
    text = json.dumps(fields, indent=indent, ensure_ascii=ascii_only)
    fields.pop("quantization_config", None)
    text = without_member(text, "quantization_config")
    assert json.loads(text) == fields
    added = with_member(text, "quantization_config", value)
    assert json.loads(added) == fields | {"quantization_config": value}
    assert list(json.loads(added)) == [*fields, "quantization_config"]
    assert without_member(added, "quantization_config") == text
    assert with_member(added, "quantization_config", value) == added
    for name in fields:
        rest = {key: item for key, item in fields.items() if key != name}
        assert json.loads(without_member(text, name)) == rest


def test_members_with_their_places() -> None:
    text = ' {"a" : [1, {"b": 2}] ,\n "c\\"": "}" }\n'
    found = [(name, text[start:value], text[value:end]) for name, start, value, end in members(text)]
    assert found == [("a", '"a" : ', '[1, {"b": 2}]'), ('c"', '"c\\"": ', '"}"')]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"torch_dtype":"float16", "x": 1}', '{"torch_dtype":"float32", "x": 1}'),
        ('{"dtype": null}', '{"dtype": "float32"}'),
        ('{"text_config": {"torch_dtype": "bfloat16"}, "torch_dtype": "bfloat16"}',
         '{"text_config": {"torch_dtype": "float32"}, "torch_dtype": "float32"}'),
        ('{"transformers_version": "4.42.3"}', '{"transformers_version": "4.42.3",\n  "torch_dtype": "float32"}'),
        ('{"transformers_version": "5.1"}', '{"transformers_version": "5.1",\n  "dtype": "float32"}'),
        ("{}", '{\n  "dtype": "float32"}'),
    ],
)  # fmt: skip
def test_the_dtype_in_the_spelling_that_is_there(text: str, wanted: str) -> None:
    assert with_dtype(text, torch.float32) == wanted
