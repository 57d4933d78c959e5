"""Which class of transformers opens a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsellm.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def auto_model(config: PretrainedConfig) -> Any:
    """The class of transformers that makes a model with a head from a configuration: of text, one that sees, one that hears.

    Raises UnsupportedModel for a type that has none of them.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    try:
        alone = config.get_text_config() is config
    except ValueError as error:
        raise UnsupportedModel(f"A {config.model_type} holds several language models, of which none is its own.") from error
    perceiving = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    classes = (AutoModelForCausalLM, *perceiving) if alone else (*perceiving, AutoModelForCausalLM)
    if getattr(config, "auto_map", None):
        return classes[0]  # its own code is not in transformers' tables
    for auto in classes:
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(f"The installed transformers has no causal language model of type {config.model_type!r}.")
