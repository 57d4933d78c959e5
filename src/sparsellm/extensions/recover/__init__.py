"""Training of the weights of a pruned model, whose zeros stay: recovery, and the training after a pruning."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={"recover": "sparsellm.extensions.recover.commands:recover"},
    recipes={"recover": "sparsellm.extensions.recover.recipe:RecoveryRecipe"},
    steps={"training": "sparsellm.extensions.recover.model_training:ModelTraining"},
)
