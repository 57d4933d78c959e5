"""Results of lm-eval: metrics, the tasks of a group, and the score of each question, by which two models are compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from sparsellm.evaluation.differences import Parts

HASHES = ("doc_hash", "prompt_hash", "target_hash")
"""What lm-eval records of a question besides the answers: digests of its text, its prompt and its answer."""


def question_parts(results: Mapping[str, Any], name: str, metric: str, filtered_by: str) -> Parts | None:
    """The scores of a task's questions; None for a group of tasks, and where the metric is not the mean of its scores.

    Args:
        results: What lm-eval returns, with samples.
        name: A task or group in the results.
        filtered_by: Name of the filter of the answers.
    """
    samples = [x for x in results.get("samples", {}).get(name, ()) if x.get("filter") == filtered_by]
    scores = [x.get(metric) for x in samples]
    if not scores or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in scores):
        return None
    value = results["results"][name][f"{metric},{filtered_by}"]
    if not math.isclose(math.fsum(scores) / len(scores), value, rel_tol=1e-6, abs_tol=1e-9):
        return None
    digest = hashlib.blake2b(" ".join(str(x.get(key)) for x in samples for key in HASHES).encode(), digest_size=16)
    return Parts.of(digest.hexdigest(), [float(x) for x in scores])


def leaves(results: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group; a task itself."""
    members = results["group_subtasks"].get(name)
    return [leaf for member in members for leaf in leaves(results, member)] if members else [name]


def metrics_of(figures: Mapping[str, Any]) -> list[str]:
    """The names of the metrics with a number, each with that of its filter after a comma."""
    return [key for key, value in figures.items() if "," in key and "_stderr," not in key and isinstance(value, (int, float))]
