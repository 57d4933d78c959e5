"""Prune pre-trained language models block by block.

>>> result = sparsellm.prune("facebook/opt-125m", sparsity="70%", calibration="c4")
>>> result.save_pretrained("opt-125m-70")
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"  # the build reads it from here

if TYPE_CHECKING:
    from sparsellm.activations.streams import CaptureRequest as CaptureRequest
    from sparsellm.activations.walk import Activations as Activations
    from sparsellm.activations.walk import walk as walk
    from sparsellm.errors import SingularGram as SingularGram
    from sparsellm.errors import SparseLLMError as SparseLLMError
    from sparsellm.evaluation.perplexity import perplexity as perplexity
    from sparsellm.methods import BlockMethod as BlockMethod
    from sparsellm.methods import BlockResult as BlockResult
    from sparsellm.methods import LayerResult as LayerResult
    from sparsellm.methods import Plan as Plan
    from sparsellm.methods.algorithm1 import PublishedSparseLLM as PublishedSparseLLM
    from sparsellm.methods.layerwise import LayerWise as LayerWise
    from sparsellm.methods.layerwise import collect_statistics as collect_statistics
    from sparsellm.methods.layerwise import problem_of as problem_of
    from sparsellm.methods.layerwise import prune_layer as prune_layer
    from sparsellm.methods.sparsellm import SparseLLM as SparseLLM
    from sparsellm.models.blocks import Block as Block
    from sparsellm.models.blocks import blocks_of as blocks_of
    from sparsellm.pruning.plan import uniform_plan as uniform_plan
    from sparsellm.pruning.sequential import prune_blocks as prune_blocks
    from sparsellm.recovery.fixed_masks import SparsityCallback as SparsityCallback
    from sparsellm.recovery.fixed_masks import fixed_masks as fixed_masks
    from sparsellm.reports.interface import bench as bench
    from sparsellm.reports.interface import report as report
    from sparsellm.reports.interface import search as search
    from sparsellm.reports.interface import sweep as sweep
    from sparsellm.runs.compressed_export import export as export
    from sparsellm.runs.export import Result as Result
    from sparsellm.runs.inspection import inspect as inspect
    from sparsellm.runs.interface import plan as plan
    from sparsellm.runs.interface import prune as prune
    from sparsellm.runs.interface import recover as recover
    from sparsellm.runs.measuring import evaluate as evaluate
    from sparsellm.runs.packing import pack as pack
    from sparsellm.runs.packing import unpack as unpack
    from sparsellm.runs.recipe import Recipe as Recipe
    from sparsellm.runs.recovery_recipe import RecoveryRecipe as RecoveryRecipe
    from sparsellm.runs.report import Report as Report
    from sparsellm.runs.report import load_report as load_report
    from sparsellm.runs.tracking import Tracked as Tracked
    from sparsellm.runs.verification import verify as verify
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
    from sparsellm.sparse.transformers_quantizer import load as load

_CONTENTS = {
    "ALPS": "solvers.alps",
    "Activations": "activations.walk",
    "Block": "models.blocks",
    "BlockMethod": "methods",
    "BlockResult": "methods",
    "CaptureRequest": "activations.streams",
    "FastADMM": "solvers.fast_admm",
    "Gram": "solvers.statistics",
    "InputRMS": "solvers.statistics",
    "LayerProblem": "solvers.problem",
    "LayerResult": "methods",
    "LayerSolver": "solvers",
    "LayerWise": "methods.layerwise",
    "Magnitude": "solvers",
    "NM": "solvers.patterns",
    "Pattern": "solvers.patterns",
    "Plan": "methods",
    "PublishedSparseLLM": "methods.algorithm1",
    "Recipe": "runs.recipe",
    "RecoveryRecipe": "runs.recovery_recipe",
    "Report": "runs.report",
    "Result": "runs.export",
    "SingularGram": "errors",
    "SparseGPT": "solvers.sparsegpt",
    "SparseLLM": "methods.sparsellm",
    "SparseLLMError": "errors",
    "SparsityCallback": "recovery.fixed_masks",
    "TokenCount": "solvers.statistics",
    "Tracked": "runs.tracking",
    "Unstructured": "solvers.patterns",
    "Wanda": "solvers",
    "bench": "reports.interface",
    "blocks_of": "models.blocks",
    "collect_statistics": "methods.layerwise",
    "evaluate": "runs.measuring",
    "export": "runs.compressed_export",
    "fixed_masks": "recovery.fixed_masks",
    "inspect": "runs.inspection",
    "load": "sparse.transformers_quantizer",
    "load_report": "runs.report",
    "pack": "runs.packing",
    "parse_pattern": "solvers.patterns",
    "perplexity": "evaluation.perplexity",
    "plan": "runs.interface",
    "problem_of": "methods.layerwise",
    "prune": "runs.interface",
    "prune_blocks": "pruning.sequential",
    "prune_layer": "methods.layerwise",
    "recover": "runs.interface",
    "report": "reports.interface",
    "search": "reports.interface",
    "sweep": "reports.interface",
    "uniform_plan": "pruning.plan",
    "unpack": "runs.packing",
    "verify": "runs.verification",
    "walk": "activations.walk",
}

__all__ = ["__version__", *_CONTENTS]  # noqa: PLE0604  (all strings)


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import sparsellm` loads neither torch nor transformers."""
    if name not in _CONTENTS:
        advice = import_module("sparsellm.runs.removed").replacement(name)
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}{f'. {advice}' if advice else ''}")
    return getattr(import_module(f"sparsellm.{_CONTENTS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, which completion and `help` show, although most of them are not imported yet."""
    return sorted(__all__)


class _Registration(MetaPathFinder):
    """Registers packed checkpoints with transformers once the module that loads models is imported.

    transformers looks for no plugins, and importing it here would take seconds.
    """

    module = "transformers.modeling_utils"

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as Python does, and add the registration to what runs when it is imported."""
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        """Import the file that registers packed checkpoints."""
        import_module("sparsellm.sparse.transformers_quantizer")


if _Registration.module in sys.modules:
    _Registration().register()
else:
    sys.meta_path.insert(0, _Registration())
