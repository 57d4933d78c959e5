"""The auto class of transformers that loads a model type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsellm.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def auto_model(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that builds a language, vision-language or multimodal model from a configuration.

    Raises:
        UnsupportedModel: The installed transformers has no such class for the model type.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    try:
        is_text_model = config.get_text_config() is config
    except ValueError as error:
        raise UnsupportedModel(
            f"A {config.model_type} holds several language models, and it is not defined which to prune."
        ) from error
    multimodal = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    classes = (AutoModelForCausalLM, *multimodal) if is_text_model else (*multimodal, AutoModelForCausalLM)
    if getattr(config, "auto_map", None):
        return classes[0]  # models with code of their own are not in transformers' tables
    for auto in classes:
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(f"The installed transformers has no causal language model of type {config.model_type!r}.")
