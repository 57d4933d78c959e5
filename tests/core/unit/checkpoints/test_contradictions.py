"""Checkpoints whose files contradict each other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparsellm.checkpoints.configuration import check_fields
from sparsellm.errors import BadCheckpoint

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}


def check(kind: str, **fields: Any) -> None:
    """Check the fields of a configuration."""
    from transformers import AutoConfig

    check_fields("m", {"model_type": kind, **fields}, AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is 'float32', and torch_dtype is 'bfloat16'"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": ROPE}, "rope_theta is 10000.0, and rope_parameters.rope_theta is"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": ROPE}, "rope_scaling.type is"),
        ("llama", {"rope_scaling": {"factor": 4.0}, "rope_parameters": ROPE}, "4.0, and rope_parameters.factor is 8.0"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}, "rope_parameters": {"rope_theta": 1e4}}, "rope_type is 'default'"),
        ("gpt2", {"n_layer": 3, "num_hidden_layers": 2}, "num_hidden_layers is 2, and n_layer is 3"),
        ("gpt2", {"n_head": 3, "num_attention_heads": 2}, "num_attention_heads is 2, and n_head is 3"),
        ("gemma3", {"text_config": {"dtype": "float32", "torch_dtype": "float16"}}, "text_config.dtype is 'float32'"),
        ("llama", {"architectures": ["MistralForCausalLM"]}, "model_type is 'llama', and the class MistralForCausalLM"),
    ],
)  # fmt: skip
def test_two_names_of_a_field_and_the_class_of_another_type(kind: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"m: config\.json .*{re.escape(named)}"):
        check(kind, **fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"dtype": "float32", "torch_dtype": "torch.float32", "architectures": ["LlamaForCausalLM"]}),
        ("llama", {"dtype": "float32", "torch_dtype": None, "architectures": None}),
        ("llama", {"rope_theta": 500000, "rope_scaling": {"type": "llama3", "factor": 8}, "rope_parameters": ROPE}),
        ("llama", {"rope_theta": 1e4, "rope_scaling": None}),
        ("llama", {"rope_scaling": {"type": "mrope"}, "rope_parameters": {"rope_theta": 1e4}}),
        ("llama", {"architectures": ["SomeoneElsesForCausalLM"]}),
        ("llama", {"architectures": ["MistralForCausalLM"], "auto_map": {}}),  # code of its own
        ("gpt2", {"n_layer": 3, "num_hidden_layers": 3, "architectures": ["GPT2LMHeadModel"]}),
        ("bart", {"encoder_layers": 3, "num_hidden_layers": 2}),  # not of the decoder
        ("gemma3", {"rope_theta": 1.0, "rope_parameters": {"full_attention": {"rope_theta": 2.0}}}),
        ("gemma3_text", {"architectures": ["Gemma3ForConditionalGeneration"]}),
    ],
)
def test_what_is_no_contradiction(kind: str, fields: dict[str, Any]) -> None:
    check(kind, **fields)
