"""Results in notebooks: their pages in frames, single plots, and comparisons of results in memory."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsellm
from sparsellm.errors import InvalidSetting, MissingPackage

pytest.importorskip("matplotlib")


class Elements(HTMLParser):
    """The elements of a notebook's output, and the page within its frame."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.page = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.page = dict(attrs).get("srcdoc") or self.page


@pytest.fixture
def settings(text_file: Path) -> dict[str, Any]:
    """What is measured in each run."""
    return {"evaluate": str(text_file), "sequence_length": 32, "evaluate_limit": 2}


def test_results_show_their_page(tiny: dict[str, Path], settings: dict[str, Any], tmp_path: Path) -> None:
    """The page is that of `report`; nothing but the frame has styles, so that the notebook keeps its own."""
    result = sparsellm.prune(tiny["opt"], "magnitude", 0.5, **settings)
    written = sparsellm.report(result, tmp_path / "page.html")
    output = sparsellm.prune(tiny["opt"], "magnitude", 0.5, output=tmp_path / "out", **settings)
    for shown in (result, written, output):
        elements = Elements(shown._repr_html_())  # type: ignore[union-attr]
        assert not {"style", "link", "script"} & set(elements.names)
        assert "<svg" in elements.page
        assert "of the weights in the pruned layers removed" in elements.page
    assert Elements(result._repr_html_()).page == written.read_text(encoding="utf-8")
    assert isinstance(written, Path)


def test_a_plot_is_a_figure(tiny: dict[str, Path], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which notebooks show as SVG; the message on an unknown one has the names of all."""
    result = sparsellm.prune(tiny["opt"], "magnitude", 0.5, **settings)
    figure = result.plot("error")
    assert isinstance(figure, Figure)
    assert figure._repr_svg_().startswith("<?xml")  # type: ignore[attr-defined]
    with pytest.raises(InvalidSetting, match=r"no plot 'errors'\. Its plots: error, time"):
        result.plot("errors")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match="pip install"):
        result.plot("error")
    shown = Elements(result._repr_html_())
    assert "table" in shown.names
    assert "pip install" in result._repr_html_()


def test_results_in_memory_are_compared(tiny: dict[str, Path], settings: dict[str, Any], tmp_path: Path) -> None:
    """By method and sparsity, also with a folder; the figures are those of a comparison of folders."""
    results = [sparsellm.prune(tiny["opt"], "magnitude", x, **settings) for x in ("50%", "2:4", "50%")]
    output = sparsellm.prune(tiny["opt"], "magnitude", 0.5, output=tmp_path / "out", **settings)
    compared = sparsellm.report([*results, output])
    assert [run.name for run in compared.runs] == ["magnitude 50%", "magnitude 2:4", "magnitude 50% (2)", "out"]
    by_folder = sparsellm.report([results[1].save_pretrained(tmp_path / "2-4"), tmp_path / "out"])
    assert [x["figures"] | {"seconds": 0, "seconds per block": 0} for x in compared.to_dict()["runs"][1::2]] == [
        x["figures"] | {"seconds": 0, "seconds per block": 0} for x in by_folder.to_dict()["runs"]
    ]
    assert repr(compared).count("\n") == 4
    page = Elements(compared._repr_html_()).page
    assert "magnitude 2:4" in page
    assert "sparsellm report" not in page  # no command compares what is in memory
    assert "sparsellm report" in Elements(by_folder._repr_html_()).page
    with pytest.raises(InvalidSetting, match="two"):
        sparsellm.report(results[:1])


def test_copies_of_a_model_in_memory_are_pruned(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """To the weights that its folder gives; the model stays, and a text that can be read once is read once."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny["llama"]), AutoTokenizer.from_pretrained(tiny["llama"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes: dict[str, Any] = {"samples": 4, "sequence_length": 32, "effort": "fast"}
    text = iter([text_file.read_text()])
    results = sparsellm.prune(model, sparsity=[0.5, 0.6], inplace=False, calibration=text, tokenizer=tokenizer, **sizes)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for result, sparsity in zip(results, (0.5, 0.6), strict=True):
        alone = sparsellm.prune(tiny["llama"], sparsity=sparsity, calibration=[text_file.read_text()], **sizes)
        assert all(torch.equal(x, y) for x, y in zip(result.model.parameters(), alone.model.parameters(), strict=True))
    (copy,) = [sparsellm.prune(model, "magnitude", 0.5, inplace=False)]
    assert copy.model is not model
    outputs = sparsellm.prune(model, "magnitude", ["50%", "2:4"], inplace=False, output=tmp_path / "out")
    assert [sparsellm.verify(output.folder, model).layers for output in outputs] == [21, 21]
