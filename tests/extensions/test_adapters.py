"""An adapter of PEFT beside a model's weights: no command loads it, with PEFT installed or without, and each says so once."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparsellm
from sparsellm import prune
from sparsellm.checkpoints.tensor_index import file_digest
from sparsellm.errors import BadCheckpoint
from tests.conftest import report_of

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
TOLD = "has an adapter beside its weights (adapter_config.json, adapter_model.safetensors)"

ABSENT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.partition(".")[0] == "peft" else find(name, *rest))
"""
"""A sitecustomize.py by which Python finds no PEFT, as if it were not installed."""

RUNS = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from typer.testing import CliRunner
from sparsellm.cli.app import app

folder, text, out = sys.argv[1:]
measured = ("--text", text, "--sequence-length", "32", "--evaluate-limit", "4", "--json")
runs = {
    "evaluate": ("evaluate", folder, *measured),
    "evaluate by block": ("evaluate", folder, *measured, "--max-memory", "200KB"),
    "prune": ("prune", folder, f"{out}/whole", "--method", "wanda", "--calibration", text, "--sequence-length", "32"),
    "prune by block": ("prune", folder, f"{out}/blocks", "--method", "wanda", "--calibration", text, "--sequence-length", "32",
                       "--offload"),
}
results = {"peft": find_spec("peft") is not None}
for name, words in runs.items():
    ran = CliRunner().invoke(app, words)
    results[name] = {"status": ran.exit_code, "stdout": ran.stdout, "stderr": ran.stderr}
print(json.dumps(results))
"""


@pytest.fixture
def both(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A Llama with an adapter beside it that would change every output, in the form in which PEFT writes it."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "both"))
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": "some/base"}))
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for layer in range(3):
        for name, size in (("self_attn.q_proj", 32), ("mlp.up_proj", 48)):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            factors[f"{prefix}.lora_A.weight"] = torch.randn(4, 32, generator=generator)
            factors[f"{prefix}.lora_B.weight"] = torch.randn(size, 4, generator=generator)
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def runs(folder: Path, text: Path, out: Path, *, peft: bool) -> dict[str, Any]:
    """The results of a few commands, with PEFT in this process or without it in another one."""
    out.mkdir()
    words = [str(folder), str(text), str(out)]
    if peft:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.setattr(sys, "argv", ["", *words])
            exec(RUNS, {})
        results: dict[str, Any] = json.loads(printed.getvalue())
    else:
        (out / "sitecustomize.py").write_text(ABSENT)
        paths = os.pathsep.join([str(out), str(Path(sparsellm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        line = [sys.executable, "-c", RUNS, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)
    for name, found in results.items():
        if name != "peft":
            assert found["status"] == 0, found
            assert found["stderr"].count(TOLD) == 1, found
    return results


def perplexity(result: dict[str, Any]) -> float:
    """The perplexity that `evaluate --json` printed."""
    (value,) = json.loads(result["stdout"])["perplexity"].values()
    return float(value["value"])


def test_the_same_with_peft_and_without(both: Path, tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Perplexity and pruned weights are those of the model alone, in memory and block by block; transformers' are not."""
    pytest.importorskip("peft", reason="the extra `train` is not installed")
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(both)
    assert any("lora" in name for name, _ in loaded.named_parameters())
    alone = sparsellm.evaluate(tiny["llama"], text_file, sequence_length=32, evaluate_limit=4).perplexity
    digests = set()
    for peft in (True, False):
        out = tmp_path / f"peft-{peft}"
        results = runs(both, text_file, out, peft=peft)
        assert results["peft"] is peft
        values = {perplexity(results[name]) for name in ("evaluate", "evaluate by block")}
        assert values == {x.value for x in alone.values()}
        digests |= {str(sorted((k, x.sum().item()) for k, x in tensors(out / name).items())) for name in ("whole", "blocks")}
        assert file_digest(out / "whole" / "model.safetensors") == file_digest(
            tmp_path / "peft-True" / "whole" / "model.safetensors"
        )
    assert len(digests) == 1


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: x for file in sorted(folder.glob("model*.safetensors")) for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "MODEL"),
        ("inspect", "MODEL", "--against", "MODEL"),
        ("verify", "PRUNED", "--against", "MODEL"),
        ("plan", "MODEL", "--method", "magnitude"),
        ("pack", "MODEL", "OUT", "--allow-dense"),
        ("export", "MODEL", "OUT", "--values", "int8"),
        ("prune", "MODEL", "OUT", "--method", "magnitude", "--sparsity", "50%,60%"),
        ("recover", "PRUNED", "OUT", "--against", "MODEL", "--calibration", "TEXT", "--steps", 2, "--sequence-length", 16),
        ("search", "MODEL", "OUT", "--method", "magnitude", "--evaluate", "TEXT", "--sequence-length", 16,
         "--max-perplexity-increase", "1000%", "--step", "40%"),
        ("sweep", "SWEEP", "OUT"),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)  # fmt: skip
def test_every_command_says_so_once(
    words: tuple[object, ...], both: Path, text_file: Path, tmp_path: Path, command: Command
) -> None:
    """However often it opens the checkpoint, and under several runs."""
    places: dict[object, object] = {"MODEL": both, "OUT": tmp_path / "out", "TEXT": text_file, "PRUNED": tmp_path / "pruned"}
    places["SWEEP"] = tmp_path / "grid.yaml"
    (tmp_path / "grid.yaml").write_text(f"recipe: {{model: {both}, method: magnitude}}\naxes: {{sparsity: [50%, 60%]}}\n")
    if "PRUNED" in words:
        assert command("prune", both, tmp_path / "pruned", "--method", "magnitude").exit_code == 0
    ran = command(*(places.get(word, word) for word in words))
    assert ran.exit_code == 0, ran.stderr
    assert " ".join(ran.stderr.split()).count(TOLD) == 1, ran.stderr
    assert "adapter" not in ran.stdout
    assert not [file for file in (tmp_path / "out").rglob("adapter*") if (tmp_path / "out").exists()]


def test_reports_and_warnings_have_it(both: Path, tmp_path: Path) -> None:
    """From Python: the report of a run, and a warning where there is none."""
    out = prune(both, "magnitude", "50%").save_pretrained(tmp_path / "out")
    assert sum(TOLD in note for note in report_of(out)["notes"]) == 1
    with pytest.warns(UserWarning, match="adapter"):
        sparsellm.inspect(both)


def test_an_adapter_alone(both: Path) -> None:
    """Is no model: the message names its base."""
    (both / "model.safetensors").unlink()
    for call in (lambda: prune(both, "magnitude", "50%"), lambda: sparsellm.inspect(both), lambda: sparsellm.pack(both, "x")):
        with pytest.raises(BadCheckpoint, match=r"both .*adapter of some/base"):
            call()
