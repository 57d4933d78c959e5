"""A tied tensor is one tensor, under whichever of its names the files hold it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import Result

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import BadCheckpoint
from sparsellm.outputs.inspection import inspect
from sparsellm.outputs.journal import work_directory
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from tests.conftest import byte_tokenizer, long_unless, report_of
from tests.core.cli.test_headers import refused_by_all
from tests.core.integration.test_families import CONFIGS, GATED, tensors_of, written

NAMES = ("first", "second", "both")
FORMS = ("single", "shards", "bin")


def tied_model(family: str, folder: Path) -> dict[str, Tensor]:
    """Write a tiny model with tied embeddings; its tensors, tied ones by both names."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config).eval()
    assert model.all_tied_weights_keys
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def store(tensors: dict[str, Tensor], folder: Path, form: str) -> None:
    """Write tensors as the weights of a model, in place of those that it has."""
    for file in (*folder.glob("*.safetensors*"), *folder.glob("*.bin")):
        file.unlink()
    if form == "single":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    parts = {"model": tensors} if form == "bin" else {}
    if form == "shards":
        names = sorted(tensors)
        parts = {f"model-{at:05}-of-00002": {name: tensors[name] for name in names[at - 1 :: 2]} for at in (1, 2)}
        index = {name: f"{part}.safetensors" for part, held in parts.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for part, held in parts.items():
        if form == "bin":
            torch.save(held, folder / "pytorch_model.bin")
        else:
            save_file(held, folder / f"{part}.safetensors", metadata={"format": "pt"})


BODIES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def under(tensors: dict[str, Tensor], names: str) -> dict[str, Tensor]:
    """The tensors with the embedding under its own name, the head's, or both."""
    left = {"first": HEADS, "second": BODIES, "both": ()}[names]
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(left)}
    assert len(kept) == len(tensors) - (names != "both")
    return kept


QUICK = ("llama", "opt", "gpt2")


@pytest.mark.parametrize("family", [long_unless(name in QUICK, name) for name in CONFIGS])
def test_every_family_is_pruned_under_either_name(family: str, tmp_path: Path) -> None:
    """Pruned in memory and block by block, verified, with the dense embedding, and always the same tensors.

    Every form under every name for Llama, each once for the others.
    """
    folder, out = tmp_path / "model", tmp_path / "out"
    tensors = tied_model(family, folder)
    count = sum(tensor.numel() for tensor in under(tensors, "first").values())
    first: dict[str, Tensor] = {}
    cases = itertools.product(FORMS, NAMES) if family == "llama" else zip(FORMS, NAMES, strict=True)
    for number, (form, names) in enumerate(cases):
        stream = number % 2 == 1  # every form and every name once in memory and once not: their product takes twice as long
        store(under(tensors, names), folder, form)
        with work_directory(out) as work:
            recipe = read_recipe({"model": str(folder), "method": "magnitude", "sparsity": "2:4", "offload": stream})
            prune_run(recipe, work=work).save_pretrained(out, overwrite=True)
        found = inspect(str(out), against=str(folder), expect="2:4")
        case = form, names, stream
        assert found.as_expected, case
        assert found.parameters == report_of(out)["totals"]["parameters"] == count, case
        assert found.only_here == found.only_there == (), case
        assert not [name for name in found.changed if name.endswith((*HEADS, *BODIES))], case
        loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
        first = first or loaded
        assert loaded.keys() == first.keys(), case
        assert all(torch.equal(tensor, first[name]) for name, tensor in loaded.items()), case
        shutil.rmtree(out)


@pytest.mark.parametrize("memory", [(), ("--offload",)], ids=["in memory", "streamed"])
@pytest.mark.parametrize("names", NAMES)
def test_the_command_prunes_resumes_and_inspects(
    names: str, memory: tuple[str, ...], tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]
) -> None:
    """What transformers 4.41 wrote for a tied model, `lm_head.weight` alone, is as good as `embed_tokens.weight` alone."""
    folder, out = Path(shutil.copytree(tiny["llama"], tmp_path / "model")), tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    store(under(tensors, names), folder, "single")
    result = command("prune", folder, out, "--method", "magnitude", *memory)
    assert result.exit_code == 0, result.stderr
    found = json.loads(command("inspect", out, "--against", folder, "--json").stdout)
    assert len(found["changed"]) == 21
    assert found["only_here"] == found["only_there"] == []
    assert found["parameters"] == sum(tensor.numel() for tensor in load_file(tiny["llama"] / "model.safetensors").values())
    assert report_of(out)["totals"]["parameters"] == found["parameters"]


def test_a_changed_embedding_is_found_under_the_other_name(tiny: dict[str, Path], tmp_path: Path) -> None:
    """One tensor by alias is still compared bit by bit."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"][3, 4] += 1
    store(tensors, folder, "single")
    found = inspect(str(folder), against=str(tiny["llama"]))
    assert found.changed == ("lm_head.weight",)
    assert found.only_here == found.only_there == ()


@pytest.mark.parametrize("form", FORMS)
def test_two_names_with_different_values_are_refused(
    form: str, tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]
) -> None:
    """transformers would not tie them; a run block by block would take one of them: neither is done without a word."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    store(tensors, folder, form)
    refused_by_all(command, folder, tmp_path, "lm_head.weight", "embed_tokens.weight", "tie_word_embeddings")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert open_checkpoint(str(folder)).skeleton().lm_head.weight is not None


def wrapped(kind: str, folder: Path, *, outer: bool | None, inner: bool | None, head: bool) -> Path:
    """A vision-language model whose config.json says on two levels whether the head is tied; `head`: the files hold another."""
    inside = {**GATED, "num_key_value_heads": 4, "head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16}
    config = AutoConfig.for_model(
        kind,
        text_config={"model_type": TOWERS[kind], **inside},
        vision_config={"model_type": "siglip_vision_model", **vision, "patch_size": 8, "head_dim": 8, "projection_dim": 32},
        image_token_index=5,
    )
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    if not head:
        kept = {name: x for name, x in load_file(folder / "model.safetensors").items() if not name.endswith("lm_head.weight")}
        store(kept, folder, "single")
    fields = json.loads((folder / "config.json").read_text())
    for part, value in ((fields, outer), (fields["text_config"], inner)):
        del part["tie_word_embeddings"]
        part.update({} if value is None else {"tie_word_embeddings": value})
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


TOWERS = {"mistral3": "mistral", "gemma3": "gemma3_text", "paligemma": "gemma", "llava": "llama"}


@pytest.mark.parametrize("kind", [long_unless(kind in ("mistral3", "llava"), kind) for kind in TOWERS])
@pytest.mark.parametrize(
    ("outer", "inner", "head"),
    [(None, False, True), (False, None, True), (False, False, True), (None, True, False), (True, None, False)],
)
def test_a_written_field_counts_on_either_level(
    kind: str, outer: bool | None, inner: bool | None, head: bool, tmp_path: Path
) -> None:
    """Before the default of the class, as in the model that transformers builds; in memory and block by block."""
    folder = wrapped(kind, tmp_path / "model", outer=outer, inner=inner, head=head)
    reference = AutoModelForImageTextToText.from_pretrained(folder)
    tied = reference.lm_head.weight is reference.model.language_model.embed_tokens.weight
    assert tied is not head
    checkpoint = open_checkpoint(str(folder))
    model, weights = checkpoint.stream()
    assert (checkpoint.skeleton().all_tied_weights_keys == {}) is head
    assert torch.equal(checkpoint.load().lm_head.weight, reference.lm_head.weight)
    with weights.non_block():
        assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    for offload in (False, True):
        out = written(folder, tmp_path / f"out-{offload}", "magnitude", offload=offload)
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
        assert any(name.endswith("lm_head.weight") for name in tensors_of(out)) is head


def test_fields_that_tie_a_head_that_differs_are_refused(tmp_path: Path) -> None:
    """Some programs read the outer field, others the inner one."""
    folder = wrapped("mistral3", tmp_path / "model", outer=True, inner=False, head=True)
    with pytest.raises(BadCheckpoint, match="tie_word_embeddings"):
        open_checkpoint(str(folder))
