"""A method of a block: which layers are solved in which order, on which inputs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from sparsellm import (
    Activations,
    Block,
    LayerResult,
    LayerSolver,
    Plan,
    SparseGPT,
    TokenCount,
    collect_statistics,
    problem_of,
    prune_layer,
)


@dataclass(frozen=True)
class InOrder:
    """Prune each group of layers on the outputs of the pruned groups before it, in one pass for each group.

    Attributes:
        solver: The solver of each layer.
    """

    solver: LayerSolver = field(default_factory=SparseGPT)

    needs_dense_stream: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False

    @property
    def needs(self) -> type[TokenCount]:
        """The statistics that the solver reads."""
        return self.solver.needs

    def note(self, block: Block, plan: Plan) -> str:
        """No remark."""
        return ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult]:
        """Prune the planned layers of a block in place, group by group in running order."""
        for group in block.architecture.groups:
            names = [name for name in group if block.full_name(name) in plan]
            if names:
                statistics = collect_statistics(block, inputs, dict.fromkeys(names, self.solver.needs))
                for name in names:
                    problem = problem_of(block, name, statistics[name])
                    yield prune_layer(block, name, problem, solver=self.solver, plan=plan)
