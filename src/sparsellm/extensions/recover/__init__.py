"""Recovery: training of the weights of a pruned model, whose zeros stay."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"recover": "sparsellm.extensions.recover.commands:recover"},
)
