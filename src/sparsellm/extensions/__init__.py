"""Extensions of sparsellm, each a folder that its entry point in pyproject.toml names. The core imports none of them."""
