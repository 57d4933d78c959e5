"""Prune pre-trained language models towards the global goal, block by block.

>>> result = sparsellm.prune("facebook/opt-125m", sparsity="70%", calibration="c4")
>>> result.save_pretrained("opt-125m-70")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from sparsellm.errors import SparseLLMError as SparseLLMError
    from sparsellm.evaluation import perplexity as perplexity
    from sparsellm.inspection import inspect as inspect
    from sparsellm.methods.layerwise import LayerWise as LayerWise
    from sparsellm.methods.published import PublishedSparseLLM as PublishedSparseLLM
    from sparsellm.methods.sparsellm import SparseLLM as SparseLLM
    from sparsellm.patterns import NM as NM
    from sparsellm.patterns import Unstructured as Unstructured
    from sparsellm.patterns import parse_pattern as parse_pattern
    from sparsellm.recipe import Recipe as Recipe
    from sparsellm.recipe import RecoveryRecipe as RecoveryRecipe
    from sparsellm.report import Report as Report
    from sparsellm.run import Result as Result
    from sparsellm.run import prune as prune
    from sparsellm.run import recover as recover
    from sparsellm.sequential import prune_blocks as prune_blocks
    from sparsellm.solvers.alps import ALPS as ALPS
    from sparsellm.solvers.criteria import Magnitude as Magnitude
    from sparsellm.solvers.criteria import Wanda as Wanda
    from sparsellm.solvers.sparsegpt import SparseGPT as SparseGPT
    from sparsellm.solvers.swift import Swift as Swift
    from sparsellm.tracking import Tracked as Tracked
    from sparsellm.verification import verify as verify
    from sparsellm.walk import walk as walk

_CONTENTS = {
    "ALPS": "solvers.alps",
    "LayerWise": "methods.layerwise",
    "Magnitude": "solvers.criteria",
    "NM": "patterns",
    "PublishedSparseLLM": "methods.published",
    "Recipe": "recipe",
    "RecoveryRecipe": "recipe",
    "Report": "report",
    "Result": "run",
    "SparseGPT": "solvers.sparsegpt",
    "Swift": "solvers.swift",
    "SparseLLM": "methods.sparsellm",
    "SparseLLMError": "errors",
    "Tracked": "tracking",
    "Unstructured": "patterns",
    "Wanda": "solvers.criteria",
    "inspect": "inspection",
    "parse_pattern": "patterns",
    "perplexity": "evaluation",
    "prune": "run",
    "prune_blocks": "sequential",
    "recover": "run",
    "verify": "verification",
    "walk": "walk",
}

__all__ = ["__version__", *_CONTENTS]  # noqa: PLE0604  (all strings)


def __getattr__(name: str) -> Any:
    """A public name, imported when first asked for: `import sparsellm` itself loads neither torch nor transformers."""
    if name not in _CONTENTS:
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}")
    return getattr(import_module(f"sparsellm.{_CONTENTS[name]}"), name)
