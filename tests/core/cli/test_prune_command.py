"""`sparsellm prune` from a checkpoint to a pruned checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sparsellm
from sparsellm.solvers.patterns import NM, parse_pattern
from tests.conftest import extensions, long_unless, report_of

Command = Callable[..., Result]
METHODS = ("magnitude", "wanda", "sparsegpt", "fast-admm", "alps", "sparsellm")
QUICK = ("--samples", 8, "--sequence-length", 32)
TIMED = {"sparsellm.json", "sparsellm-log.jsonl"}
"""Files that hold times."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("method", "sparsity", "family"),
    [
        long_unless((place + number + (family == "opt")) % 2 == 0, method, sparsity, family)
        for place, method in enumerate(METHODS)
        for number, sparsity in enumerate(("70%", "2:4"))
        for family in ("opt", "llama")
    ],
)
def test_zeros_exact_and_all_else_untouched(
    method: str, sparsity: str, family: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """The zeros are exact, each layer's or all layers'; every tensor not told of is bit-identical, in the same dtype."""
    out = tmp_path / "out"
    text = () if method == "magnitude" else ("--calibration", text_file, *QUICK)
    result = command("prune", tiny[family], out, "--method", method, "--sparsity", sparsity, *text)
    assert result.exit_code == 0, result.stderr
    pattern = parse_pattern(sparsity)
    before, after = weights(tiny[family]), weights(out)
    assert before.keys() == after.keys()
    blocks = report_of(out)["blocks"]
    pruned = {f"{layer['name']}.weight": parse_pattern(layer["pattern"]) for block in blocks for layer in block["layers"]}
    moved = {name for block in blocks for name in block["changed_parameters"]}
    assert len(pruned) == 3 * (6 if family == "opt" else 7)
    assert bool(moved) == (method == "sparsellm" and family == "opt")  # biases; this Llama has none
    for key, tensor in after.items():
        assert tensor.dtype == before[key].dtype
        if key not in pruned:
            assert torch.equal(tensor, before[key]) != (key in moved), key
            continue
        zero = tensor == 0
        assert int(zero.sum()) == pruned[key].count_removed(tensor.shape), key
        if isinstance(pattern, NM):
            assert (zero.unflatten(1, (-1, pattern.group)).sum(-1) == pattern.zeros).all(), key
    every = [tensor for key, tensor in after.items() if key in pruned]
    zeros, weights_in_all = sum(int((x == 0).sum()) for x in every), sum(x.numel() for x in every)
    assert zeros == (
        pattern.count_removed([weights_in_all]) if method == "sparsellm" else sum(pattern.count_removed(x.shape) for x in every)
    )


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_give_the_same_bytes(
    method: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Weights, card and configuration are the same bytes; only the times in report and log may differ."""
    text = () if method == "magnitude" else ("--calibration", text_file, *QUICK)
    for name in ("one", "two"):
        assert command("prune", tiny["llama"], tmp_path / name, "--method", method, *text).exit_code == 0
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "two").iterdir())
    for name in names:
        if name not in TIMED:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_output_is_a_whole_checkpoint(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """It loads in transformers with the measured perplexity, holds no sparsity settings, and leaves nothing else behind."""
    out = tmp_path / "out"
    ran = command("prune", tiny["opt"], out, "--calibration", text_file, *QUICK, "--evaluate", text_file, "--json")
    assert ran.exit_code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "sparsellm.json"} <= {
        file.name for file in out.iterdir()
    }
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert "sparsity_config" not in config
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(tiny["opt"]))
    again = command("evaluate", out, "--text", text_file, "--sequence-length", 32, "--json")
    assert again.exit_code == 0, again.stderr
    measured = json.loads(again.stdout)["perplexity"][str(text_file)]["value"]
    assert measured == pytest.approx(report["perplexity"][str(text_file)]["pruned"]["value"], rel=1e-6)


def test_the_first_windows_of_a_text(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """Few windows for a try: the perplexity of those, told as such, the same by `prune` and by `evaluate`."""
    few = ("--sequence-length", 32, "--evaluate-limit", 3)
    ran = command("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--evaluate", text_file, *few, "--json")
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)["perplexity"][str(text_file)]
    assert [found[when]["windows"] for when in ("dense", "pruned")] == [3, 3]
    assert "first 3 sequences of 32 tokens" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    again = command("evaluate", tmp_path / "out", "--text", text_file, *few, "--json")
    measured = json.loads(again.stdout)["perplexity"][str(text_file)]
    assert measured["windows"] == 3
    assert measured["value"] == pytest.approx(found["pruned"]["value"], rel=1e-6)
    every = command("evaluate", tmp_path / "out", "--text", text_file, "--sequence-length", 32, "--json")
    assert json.loads(every.stdout)["perplexity"][str(text_file)]["windows"] > 3


def test_report_tells_what_was_run(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """The recipe really run, versions, and for each layer its sparsity, error, damping and seconds; the losses per epoch."""
    out = tmp_path / "out"
    assert (
        command(
            "prune", tiny["llama"], out, "--calibration", text_file, *QUICK, "--set", "epochs=3", "--method", "algorithm1"
        ).exit_code
        == 0
    )
    report = report_of(out)
    assert report["recipe"]["settings"] == {"epochs": 3}
    assert report["recipe"]["sequence_length"] == 32
    assert {"torch", "transformers", "python", "sparsellm", "device"} <= report["environment"].keys()
    for block in report["blocks"]:
        assert [epoch["epoch"] for epoch in block["epochs"]] == [1, 2, 3]
        assert all(0 <= epoch["feed_forward_error"] < 2 for epoch in block["epochs"])
        for layer in block["layers"]:
            assert layer["sparsity"] == pytest.approx(0.5, abs=1e-3)
            assert layer["damping"] == 0.01
            assert 0 < layer["error"] < 1
            assert layer["seconds"] > 0
            assert layer["tokens"] == 8 * 32


def test_blocks_only_and_skip(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Only the chosen layers of the chosen blocks are pruned."""
    out = tmp_path / "out"
    words = ("--blocks", "0,2", "--include", "self_attn.*", "--include", "fc2", "--exclude", "k_proj")
    assert command("prune", tiny["opt"], out, "--method", "magnitude", *words).exit_code == 0
    names = {layer["name"] for block in report_of(out)["blocks"] for layer in block["layers"]}
    ends = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj", "fc2")
    assert names == {f"model.decoder.layers.{block}.{end}" for block in (0, 2) for end in ends}


def test_yaml_holds_the_same_fields_and_options_win(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """--print-config's YAML given back with --config is the same recipe, except for what the command line overrides."""
    words = (
        tiny["opt"],
        "--calibration",
        text_file,
        "--sparsity",
        "3:4",
        "--set",
        "rounds=2",
        "--include",
        "fc1",
        "--include",
        "fc2",
    )
    printed = command("prune", *words, "--print-config")
    assert printed.exit_code == 0, printed.stderr
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(printed.stdout)
    assert command("prune", "--config", recipe, "--print-config").stdout == printed.stdout
    changed = command("prune", "--config", recipe, "--sparsity", "2:4", "--print-config").stdout
    assert changed == printed.stdout.replace("3:4", "2:4")


@extensions
def test_recipes_leave_out_what_is_at_its_default(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """As printed, on cards (of a recovery also that of the pruned model), and on pages; reading gives the same recipe."""
    common = ("--calibration", text_file, "--samples", 4, "--sequence-length", 32)
    words = ("prune", tiny["llama"], tmp_path / "out", "--method", "wanda", *common)
    fields = {"model": "llama", "calibration": "words.txt", "samples": 4, "sequence_length": 32, "method": "wanda"}
    fields["sparsity"] = "50%"
    named = fields | {"model": str(tiny["llama"]), "calibration": str(text_file)}
    assert yaml.safe_load(command(*words, "--print-config").stdout) == named
    assert command(*words).exit_code == 0
    recovered = command("recover", tmp_path / "out", tmp_path / "more", "--against", tiny["llama"], "--steps", 1, *common)
    assert recovered.exit_code == 0, recovered.stderr
    cards = [(tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("out", "more")]
    blocks = [
        [yaml.safe_load(x) for x in re.findall(r"^```\w*\n(model:.*?)^```", card, re.DOTALL | re.MULTILINE)] for card in cards
    ]
    of_recovery = {name: value for name, value in fields.items() if name not in ("method", "sparsity")}
    assert blocks == [[fields], [of_recovery | {"pruned": "out", "steps": 1}, fields]]
    sparsellm.report([tmp_path / "out", tmp_path / "more"], tmp_path / "page.html")
    assert "null" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    default = sparsellm.Recipe(model="demo:opt", method="magnitude")
    assert yaml.safe_load(default.to_yaml()) == {"model": "demo:opt", "method": "magnitude", "sparsity": "50%"}
    other = sparsellm.Recipe(
        model="demo:opt", method="magnitude", documents="whole", seed=3, evaluate=("demo",), keep_zeros=True
    )
    assert sparsellm.Recipe(**yaml.safe_load(other.to_yaml())) == other


@extensions
def test_saved_report_gives_the_recipe_of_its_run(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe read from a report is the run's; options win; local files that are not here have to be passed again."""
    out, again = tmp_path / "out", tmp_path / "again"
    words = (tiny["opt"], out, "--method", "wanda", "--sparsity", "3:4", "--include", "fc1", *QUICK, "--calibration", text_file)
    words += ("--evaluate", text_file, "--evaluate", "demo", "--evaluate-limit", 2)
    assert command("prune", *words).exit_code == 0
    printed = command("prune", *words, "--print-config").stdout

    monkeypatch.chdir(tmp_path)
    message = " ".join(command("prune", "--config", out / "sparsellm.json", again).stderr.split())
    named = f"MODEL {tiny['opt'].name}, --calibration {text_file.name}, --evaluate {text_file.name}. Pass these settings again."
    assert named in message
    assert not again.exists()
    plan = command("plan", tiny["opt"], "--config", out, "--calibration", text_file)
    assert plan.exit_code == 1
    assert f"exist here: --evaluate {text_file.name}." in " ".join(plan.stderr.split())

    Path(text_file.name).symlink_to(text_file)
    Path(tiny["opt"].name).symlink_to(tiny["opt"])
    by_name = printed.replace(str(text_file), text_file.name).replace(str(tiny["opt"]), tiny["opt"].name)
    assert by_name != printed
    for config in (out, out / "sparsellm.json"):
        assert command("prune", "--config", config, "--print-config").stdout == by_name
    changed = command("prune", "--config", out, "--sparsity", "2:4", "--print-config").stdout
    assert changed == by_name.replace("3:4", "2:4")
    assert command("prune", "--config", out, again).exit_code == 0
    assert all(torch.equal(weight, weights(out)[name]) for name, weight in weights(again).items())


def test_overwrite_replaces_only_what_sparsellm_wrote(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """An output that exists is refused; with --overwrite it is replaced if a run wrote it, and only then."""
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    words = ("--method", "magnitude", "--sparsity")
    assert command("prune", tiny["opt"], out, *words, "50%").exit_code == 0
    refused = command("prune", tiny["opt"], out, *words, "60%")
    assert refused.exit_code == 1
    assert "exists" in refused.stderr
    assert report_of(out)["recipe"]["sparsity"] == "50%"
    assert command("prune", tiny["opt"], out, *words, "60%", "--overwrite").exit_code == 0
    assert report_of(out)["recipe"]["sparsity"] == "60%"
    itself = command("prune", out, out, *words, "70%", "--overwrite")
    assert itself.exit_code == 1
    assert "the folder of a model that is read" in itself.stderr
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    assert command("prune", tiny["opt"], foreign, *words, "60%").exit_code == 1
    assert command("prune", tiny["opt"], foreign, *words, "60%", "--overwrite").exit_code == 1
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_progress_goes_to_stderr_and_data_to_stdout(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """stdout is one JSON document; stderr has a plain line for each stage."""
    ran = command("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--json")
    json.loads(ran.stdout)
    stages = [line.split("  ")[0].split(",")[0] for line in ran.stderr.splitlines() if "memory" in line]
    assert list(dict.fromkeys(stages))[-3:] == ["1/2 loading", "2/2 pruning", "writing and verifying"]


@extensions
def test_few_tokens_are_told(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A note in the output, the report and the plan says how many samples are needed; the run goes on."""
    out = tmp_path / "out"
    words = ("--method", "sparsegpt", "--calibration", text_file, "--samples", 1, "--sequence-length", 16)
    ran = command("prune", tiny["opt"], out, *words)
    assert ran.exit_code == 0, ran.stderr
    assert "0.25 for each of the 64 inputs" in ran.stderr.replace("\n", " ")
    assert any("use 80 samples" in note for note in report_of(out)["notes"])
    planned = command("plan", tiny["opt"], *words)
    assert "use 80 samples" in (planned.stdout + planned.stderr).replace("\n", " ")


def test_recipe_file_may_name_the_model(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """With `model:` in the recipe the one name on the command line is the output; 2:4 in YAML is no number to the base 60."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny['opt']}\nmethod: magnitude\nsparsity: 2:4\nblocks: 2\ninclude: fc1\n")
    result = command("prune", tmp_path / "out", "--config", recipe)
    assert result.exit_code == 0, result.stderr
    assert [layer["name"] for block in report_of(tmp_path / "out")["blocks"] for layer in block["layers"]] == [
        "model.decoder.layers.2.fc1"
    ]
    assert "TokenCount" not in report_of(tmp_path / "out")["resolved"]["method"]
    assert report_of(tmp_path / "out")["resolved"]["computed_in"] == "torch.float32"


@extensions
@pytest.mark.parametrize("known", [True, False])
def test_a_model_that_is_pruned_already(known: bool, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Headline, card, page and report say how many zeros there were and are; before and after the run what to pass."""
    half, out, words = tmp_path / "half", tmp_path / "out", ("--method", "magnitude", "--sparsity")
    assert command("prune", tiny["opt"], half, *words, "50%").exit_code == 0
    if not known:  # another program pruned it
        (half / "sparsellm.json").unlink()
    ran = command("prune", half, out, *words, "30%")
    assert ran.exit_code == 0, ran.stderr
    advice = "Pass --keep-zeros to keep these zeros, and a sparsity of more than 50.00 % to remove more"
    notes = [line for line in ran.stderr.splitlines() if line.startswith("note: ")]
    before = [f"note: {half} is pruned already: 50.00 % of the weights in 18 layers are zero. {advice}"]
    zeros = "50.00 % were zero before and 50.00 % are now"
    assert notes == before * known + [f"note: of the weights in the pruned layers {zeros}. {advice}"]
    assert ran.stdout.splitlines()[0] == f"{half}: magnitude, 30 % to be zero, unstructured; {zeros}"
    card, saved = (out / "README.md").read_text(encoding="utf-8"), sparsellm.load_report(out)
    assert f"magnitude, 30 % to be zero, unstructured; {zeros}." in card
    assert card.count(zeros) == 2
    assert advice in card
    assert f"30 % to be zero, unstructured; {zeros}" in str(saved)
    assert saved.totals.sparsity_before == 0.5
    pytest.importorskip("matplotlib")
    page = sparsellm.report(out).read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert "50 % of the weights in the pruned layers zero, 50 % before the run;" in page
    assert f"30 % to be zero, unstructured; {zeros}: 18 layers." in page
    assert advice in page
    for text in (ran.stdout, card, page):
        assert "removed," not in text
        assert "more zeros than requested" not in text


@pytest.mark.parametrize(("sparsity", "noted"), [("30%", True), ("60%", False)])
def test_zeros_that_are_kept(sparsity: str, noted: bool, tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """With --keep-zeros nothing is noted, unless the sparsity is one that the model has already."""
    half, out, words = tmp_path / "half", tmp_path / "out", ("--method", "magnitude", "--sparsity")
    assert command("prune", tiny["opt"], half, *words, "50%").exit_code == 0
    ran = command("prune", half, out, *words, sparsity, "--keep-zeros")
    assert ran.exit_code == 0, ran.stderr
    assert ran.stderr.count("note: ") == ran.stderr.count("Pass a sparsity of more than 50.00 % to remove more") == 2 * noted
    now = float(re.search(r"50.00 % were zero before and ([\d.]+) % are now", ran.stdout)[1])
    assert now == pytest.approx(max(50, int(sparsity[:-1])), abs=0.05)
