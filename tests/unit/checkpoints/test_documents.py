"""config.json with a dtype changed."""

from __future__ import annotations

import pytest
import torch

from sparsellm.checkpoints.documents import with_dtype


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"torch_dtype": "float16", "x": 1}, {"torch_dtype": "float32", "x": 1}),
        ({"dtype": None}, {"dtype": "float32"}),
        ({"text_config": {"torch_dtype": "bfloat16"}, "torch_dtype": "bfloat16"},
         {"text_config": {"torch_dtype": "float32"}, "torch_dtype": "float32"}),
        ({"transformers_version": "4.42.3"}, {"transformers_version": "4.42.3", "torch_dtype": "float32"}),
        ({"transformers_version": "5.1"}, {"transformers_version": "5.1", "dtype": "float32"}),
        ({}, {"dtype": "float32"}),
    ],
)  # fmt: skip
def test_the_dtype_under_the_name_that_is_there(fields: dict, wanted: dict) -> None:
    assert with_dtype(fields, torch.float32) == wanted
