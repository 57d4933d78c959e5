"""Studies: sweeps, searches and the demo; comparisons, pages and plots. Knows the extensions that pack and recover."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    commands={name: f"sparsellm.extensions.studies.commands:{name}" for name in ("sweep", "search", "report", "bench", "demo")},
    views={name: f"sparsellm.extensions.studies.views:{name}" for name in ("html", "plot")},
    sections={"search": "sparsellm.extensions.studies.search_result:SearchResult"},
)
