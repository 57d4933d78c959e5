"""Results in notebooks: the page of a run or a comparison inside the notebook's, and single plots."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from sparsellm.errors import InvalidSetting, SparseLLMError
from sparsellm.evaluation.results import Summarized
from sparsellm.extensions.studies.compare import Comparison
from sparsellm.extensions.studies.figures import style
from sparsellm.extensions.studies.page import comparison_page, report_page
from sparsellm.extensions.studies.plots import run_plots
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import Output
from sparsellm.recipes.path_names import PathNames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FRAME = "width:100%;height:40rem;border:0"


def framed(page: str) -> str:
    """A page in a frame, whose styles do not reach the page that it is in. It needs no file and no network."""
    return f'<iframe title="sparsellm" style="{_FRAME}" srcdoc="{escape(page)}"></iframe>'


def html(result: Result | Output | Comparison) -> str:
    """A result as HTML: its summary, which also viewers without frames show, and its page; or why there is no page."""
    summary = Summarized._repr_html_(result)
    try:
        if isinstance(result, Comparison):
            return summary + framed(comparison_page(result))
        return summary + framed(report_page(result if isinstance(result, Result) else result.folder)[0])
    except SparseLLMError as error:
        return f"{summary}<p>{escape(str(error))}</p>"


def plot(result: Result | Output, name: str) -> Figure:
    """A plot of a run by its name.

    Raises:
        InvalidSetting: The run has no such plot.
        MissingPackage: matplotlib is not installed.
    """
    with style():
        plots = {x.name.removesuffix("-map"): x for x in run_plots(result.report.named(PathNames(result.report.recipe)))}
    if name not in plots:
        raise InvalidSetting(f"This run has no plot {name!r}. Its plots: {', '.join(plots) or 'none'}.")
    chosen = plots[name]
    # Notebooks show figures of pyplot alone, and ask other objects for this method.
    vars(chosen.figure)["_repr_svg_"] = lambda: chosen.save("svg").decode()
    return chosen.figure
