"""Prune pre-trained language models block by block.

>>> result = sparsellm.prune("facebook/opt-125m", sparsity="70%", calibration="c4")
>>> result.save_pretrained("opt-125m-70")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"  # the build reads it from here

if TYPE_CHECKING:
    from sparsellm.activations.streams import CaptureRequest as CaptureRequest
    from sparsellm.activations.walk import Activations as Activations
    from sparsellm.activations.walk import walk as walk
    from sparsellm.errors import SingularGram as SingularGram
    from sparsellm.errors import SparseLLMError as SparseLLMError
    from sparsellm.extension import Extension as Extension
    from sparsellm.extensions.integers.compressed_export import export as export
    from sparsellm.extensions.packed.formats.transformers import load as load
    from sparsellm.extensions.packed.formats.transformers import register as register
    from sparsellm.extensions.packed.packing import pack as pack
    from sparsellm.extensions.packed.packing import unpack as unpack
    from sparsellm.extensions.planning.interface import plan as plan
    from sparsellm.extensions.recover.interface import recover as recover
    from sparsellm.extensions.recover.recipe import RecoveryRecipe as RecoveryRecipe
    from sparsellm.extensions.recover.training.fixed_masks import SparsityCallback as SparsityCallback
    from sparsellm.extensions.recover.training.fixed_masks import fixed_masks as fixed_masks
    from sparsellm.extensions.sharing.tracking import Tracked as Tracked
    from sparsellm.extensions.studies.interface import bench as bench
    from sparsellm.extensions.studies.interface import report as report
    from sparsellm.extensions.studies.interface import search as search
    from sparsellm.extensions.studies.interface import sweep as sweep
    from sparsellm.methods import BlockMethod as BlockMethod
    from sparsellm.methods import BlockResult as BlockResult
    from sparsellm.methods import LayerResult as LayerResult
    from sparsellm.methods import Plan as Plan
    from sparsellm.methods.algorithm1 import Algorithm1 as Algorithm1
    from sparsellm.methods.layerwise import LayerWise as LayerWise
    from sparsellm.methods.layerwise import collect_statistics as collect_statistics
    from sparsellm.methods.layerwise import problem_of as problem_of
    from sparsellm.methods.layerwise import prune_layer as prune_layer
    from sparsellm.methods.sparsellm import SparseLLM as SparseLLM
    from sparsellm.models.blocks import Block as Block
    from sparsellm.models.blocks import blocks_of as blocks_of
    from sparsellm.outputs.inspection import inspect as inspect
    from sparsellm.outputs.report import Report as Report
    from sparsellm.outputs.report import load_report as load_report
    from sparsellm.outputs.saving import Result as Result
    from sparsellm.outputs.verification import Output as Output
    from sparsellm.outputs.verification import verify as verify
    from sparsellm.pipeline.evaluate import evaluate as evaluate
    from sparsellm.pipeline.evaluate import perplexity as perplexity
    from sparsellm.pipeline.interface import prune as prune
    from sparsellm.pipeline.sequential import prune_blocks as prune_blocks
    from sparsellm.recipes.plan import uniform_plan as uniform_plan
    from sparsellm.recipes.recipe import Recipe as Recipe
    from sparsellm.solvers import LayerSolver as LayerSolver
    from sparsellm.solvers import Magnitude as Magnitude
    from sparsellm.solvers import Wanda as Wanda
    from sparsellm.solvers.alps import ALPS as ALPS
    from sparsellm.solvers.fast_admm import FastADMM as FastADMM
    from sparsellm.solvers.patterns import NM as NM
    from sparsellm.solvers.patterns import Pattern as Pattern
    from sparsellm.solvers.patterns import Unstructured as Unstructured
    from sparsellm.solvers.patterns import parse_pattern as parse_pattern
    from sparsellm.solvers.problem import LayerProblem as LayerProblem
    from sparsellm.solvers.sparsegpt import SparseGPT as SparseGPT
    from sparsellm.solvers.statistics import Gram as Gram
    from sparsellm.solvers.statistics import InputRMS as InputRMS
    from sparsellm.solvers.statistics import TokenCount as TokenCount

_CONTENTS = {
    "ALPS": "solvers.alps",
    "Activations": "activations.walk",
    "Block": "models.blocks",
    "BlockMethod": "methods",
    "BlockResult": "methods",
    "CaptureRequest": "activations.streams",
    "Extension": "extension",
    "FastADMM": "solvers.fast_admm",
    "Gram": "solvers.statistics",
    "InputRMS": "solvers.statistics",
    "LayerProblem": "solvers.problem",
    "LayerResult": "methods",
    "LayerSolver": "solvers",
    "LayerWise": "methods.layerwise",
    "Magnitude": "solvers",
    "NM": "solvers.patterns",
    "Output": "outputs.verification",
    "Pattern": "solvers.patterns",
    "Plan": "methods",
    "Algorithm1": "methods.algorithm1",
    "Recipe": "recipes.recipe",
    "RecoveryRecipe": "extensions.recover.recipe",
    "Report": "outputs.report",
    "Result": "outputs.saving",
    "SingularGram": "errors",
    "SparseGPT": "solvers.sparsegpt",
    "SparseLLM": "methods.sparsellm",
    "SparseLLMError": "errors",
    "SparsityCallback": "extensions.recover.training.fixed_masks",
    "TokenCount": "solvers.statistics",
    "Tracked": "extensions.sharing.tracking",
    "Unstructured": "solvers.patterns",
    "Wanda": "solvers",
    "bench": "extensions.studies.interface",
    "blocks_of": "models.blocks",
    "collect_statistics": "methods.layerwise",
    "evaluate": "pipeline.evaluate",
    "export": "extensions.integers.compressed_export",
    "fixed_masks": "extensions.recover.training.fixed_masks",
    "inspect": "outputs.inspection",
    "load": "extensions.packed.formats.transformers",
    "load_report": "outputs.report",
    "pack": "extensions.packed.packing",
    "parse_pattern": "solvers.patterns",
    "perplexity": "pipeline.evaluate",
    "plan": "extensions.planning.interface",
    "problem_of": "methods.layerwise",
    "prune": "pipeline.interface",
    "prune_blocks": "pipeline.sequential",
    "prune_layer": "methods.layerwise",
    "recover": "extensions.recover.interface",
    "register": "extensions.packed.formats.transformers",
    "report": "extensions.studies.interface",
    "search": "extensions.studies.interface",
    "sweep": "extensions.studies.interface",
    "uniform_plan": "recipes.plan",
    "unpack": "extensions.packed.packing",
    "verify": "outputs.verification",
    "walk": "activations.walk",
}

__all__ = ["__version__", *_CONTENTS]  # noqa: PLE0604  (all strings)


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import sparsellm` loads neither torch nor transformers."""
    if name not in _CONTENTS:
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}")
    return getattr(import_module(f"sparsellm.{_CONTENTS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, which completion and `help` show, although most of them are not imported yet."""
    return sorted(__all__)
