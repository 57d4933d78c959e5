"""Names come from torch, transformers, numpy, scikit-learn or a cited paper; names that were replaced do not come back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PACKAGE = ROOT / "src" / "sparsellm"

RETIRED = {
    "NoInputs": "TokenCount",
    "Unwaiting": "NonBlockingSolver",
    "Twins": "PairedStatistics",
    "Carried": "LinearTargetRegression",
    "TwoStreams": "BlockSolver",
    "Recall": "OutputCache",
    "Onward": "StreamUpdate",
    "Look": "Hook",
    "Asked": "CaptureRequest",
    "Seen": "Capture",
    "Enough": "StopForward",
    "Residence": "LoadedModel",
    "OnDisk": "DiskWeights",
    "Ahead": "Prefetch",
    "Kept": "TensorList",
    "gone": "pruned_mask",
    "told": "message",
    "say": "observer",
    "glimpse": "capture",
    "looking": "capture_hooks",
    "arrive": "begin_block",
    "firsts": "sample_offsets",
    "dealt": "shard",
    "collected": "all_gather",
    "agreed": "broadcast_object",
    "leads": "is_main",
    "damped": "add_diagonal",
    "share_lost": "relative_error",
    "share_out": "allocate",
    "standing_in": "run_with_replaced_blocks",
    "coming_back": "gradient_hooks",
    "swift": "fast_admm",
}
"""Each with the name that took its place."""


def names_of(file: Path) -> Iterator[tuple[int, str]]:
    """Every name that a file defines, binds or uses, with its line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.lineno, node.arg


def test_no_retired_name_is_used() -> None:
    used = [
        f"{file.relative_to(PACKAGE)} line {line}: {name}, now {RETIRED[name]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, name in names_of(file)
        if name in RETIRED
    ]
    assert not used


def test_documentation_names_no_retired_option() -> None:
    retired = ("--couple", "--newton", "--stream", "--no-stream", "--length", "--memory", "--skip", "--track")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    used = [(page.name, option) for page in pages for option in retired if option in page.read_text(encoding="utf-8")]
    assert not used, used
