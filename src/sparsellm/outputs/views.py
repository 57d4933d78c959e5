"""Results of runs that notebooks show, and whose plots can be had, by what an extension draws of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsellm.errors import InvalidSetting
from sparsellm.evaluation.results import Summarized
from sparsellm.extension import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Viewed(Summarized):
    """A result that notebooks show as an extension draws it, or without one by its summary."""

    def _repr_html_(self) -> str:
        draw = find("views", "html")
        return super()._repr_html_() if draw is None else str(draw(self))


class Plotted(Viewed):
    """The result of a run, with its plots."""

    def plot(self, name: str) -> Figure:
        """Draw a plot of the page that `report` writes, such as "error".

        Args:
            name: Its name; the message for an unknown one lists those of this run.

        Returns:
            The figure, which notebooks show.

        Raises:
            InvalidSetting: The run has no such plot, or no installed package draws any.
            MissingPackage: matplotlib is not installed.
        """
        draw = find("views", "plot")
        if draw is None:
            raise InvalidSetting("No installed package draws plots.")
        figure: Figure = draw(self, name)
        return figure
