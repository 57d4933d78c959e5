"""A checkpoint read block by block gives what `from_pretrained` gives, bit for bit, in every form that one comes in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.allocation.rules import fisher
from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.comparison import StoredTensors, compare
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.checkpoints.tensor_index import NotStreamable, TensorLocation, read_stored
from sparsellm.errors import BadCheckpoint
from sparsellm.evaluation.perplexity import streamed_perplexity
from sparsellm.evaluation.perplexity import token_perplexity as perplexity
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.outputs.journal import Journal
from sparsellm.recipes.plan import uniform_plan
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.patterns import parse_pattern
from tests.conftest import long_unless
from tests.core.cli.test_bad_input import refused
from tests.pairwise import pairwise
from tests.pruning import loaded, prune_blocks

SHARED = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32}
every_family = pytest.mark.parametrize("family", ["opt", "opt-post-norm", "llama", "llama-untied"])


def random_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "opt":
        return OPTForCausalLM(OPTConfig(**SHARED, ffn_dim=48, word_embed_proj_dim=32, init_std=0.2))
    if family == "opt-post-norm":
        sizes = {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
        return OPTForCausalLM(OPTConfig(**SHARED, **sizes, init_std=0.2))
    tied = family == "llama"
    return LlamaForCausalLM(LlamaConfig(**SHARED, intermediate_size=48, initializer_range=0.2, tie_word_embeddings=tied))


def windows(count: int = 6) -> Tensor:
    return torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))


def saved(family: str, folder: Path, form: str) -> Path:
    """A checkpoint of that form: one file, shards, .bin, .bin shards, names of the model without its head, bf16."""
    model = random_model(family)
    if form == "bf16":
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20kB" if "shards" in form else "5GB")
    if "bin" in form:
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            torch.save(load_file(file), file.with_name(file.name.replace("model", "pytorch_model", 1)).with_suffix(".bin"))
            file.unlink()
        for index in folder.glob("*.index.json"):
            text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            (folder / "pytorch_model.bin.index.json").write_text(text)
            index.unlink()
    if form == "headless":
        tensors = load_file(folder / "model.safetensors")
        cut = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["single", "shards", "bin", "bin-shards", "headless", "bf16"])
@every_family
def test_streamed_model_equals_from_pretrained(family: str, form: str, tmp_path: Path) -> None:
    """Every tensor, the logits, and nothing in memory before and after."""
    folder = saved(family, tmp_path / "model", form)
    if form == "shards":
        assert len(list(folder.glob("*.safetensors"))) > 3
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    model, weights = open_checkpoint(str(folder)).stream()
    assert all(parameter.is_meta for parameter in model.parameters())
    with ExitStack() as stack:
        stack.enter_context(weights.non_block())
        for block in blocks_of(model):
            stack.enter_context(weights.block(block))
        found, wanted = model.state_dict(), whole.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
        with torch.no_grad():
            assert torch.equal(model(windows()).logits, whole(windows()).logits)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(weights.read(name), wanted[name]) for name in weights.names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_another_dtype(dtype: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", "single")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model, weights = open_checkpoint(str(folder)).stream(dtype)
    with weights.block(blocks_of(model)[1]):
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(model.state_dict()[name], whole.state_dict()[name])
        assert blocks_of(model)[1].dtypes["mlp.up_proj.weight"] == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        long_unless(number in (place, place - 2), family, budget)
        for place, family in enumerate(("opt", "opt-post-norm", "llama", "llama-untied"))
        for number, budget in enumerate((None, 0, 20_000))
    ],
)
def test_the_same_results_as_in_memory(family: str, budget: int | None, tmp_path: Path) -> None:
    """Perplexity, sensitivities, allocation and pruned weights, streamed and in memory: the same bits."""
    folder = saved(family, tmp_path / "model", "shards")
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    model, weights = open_checkpoint(str(folder)).stream()
    storage = OffloadManager(budget, tmp_path / "work")
    offloaded = loaded(model, weights=weights, storage=storage)
    batches = list(windows().split(2))
    assert streamed_perplexity(offloaded, windows()).value == perplexity(whole, windows()).value
    pairs = zip(
        output_fisher(whole, batches),
        output_fisher(offloaded, batches),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    plan = uniform_plan(blocks_of(model), parse_pattern("60%"))
    assert fisher(whole, batches, plan) == fisher(offloaded, batches, plan)
    method = SparseLLM(rounds=1)
    list(prune_blocks(whole, batches, method, plan))
    journal = Journal.begin(tmp_path / "journal", {})
    list(prune_blocks(model, batches, method, plan, weights=weights, storage=storage, journal=journal))
    for block in blocks_of(model):
        with weights.block(block):
            for name, tensor in block.module.state_dict().items():
                assert torch.equal(tensor, whole.state_dict()[f"{block.name}.{name}"]), (block.name, name)
    assert streamed_perplexity(offloaded, windows()).value == perplexity(whole, windows()).value
    assert not list((tmp_path / "work").rglob("*.safetensors"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A tensor without a place of its own: said, with its name."""
    folder = saved("llama", tmp_path / "model", "single")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotStreamable, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        open_checkpoint(str(folder)).stream()


@pytest.mark.parametrize(("spoil", "part"), [("nan", "holds NaN or infinity in model.layers.1"), ("shape", "calls for")])
def test_what_is_wrong_is_told_when_it_is_read(spoil: str, part: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", "single")
    model, weights = open_checkpoint(str(folder)).stream()
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = torch.full_like(tensors[name], float("nan")) if spoil == "nan" else tensors[name][:5].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    one, two = blocks_of(model)[:2]
    with weights.block(one):
        pass
    with pytest.raises(BadCheckpoint, match=part), weights.block(two):
        pass
    assert all(parameter.is_meta for parameter in model.parameters())
    with weights.block(one):
        assert torch.equal(one.layer("mlp.up_proj").weight, tensors["model.layers.0.mlp.up_proj.weight"])


def test_a_deleted_file_is_reported(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", "single")
    _, weights = open_checkpoint(str(folder)).stream()
    assert isinstance(weights, DiskWeights)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="cannot be read from"), weights.non_block():
        pass
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


class Code:
    """What a hostile file would hold."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this must never be printed",)


@pytest.mark.parametrize(
    ("shape", "dtype", "piece"),
    pairwise(
        [(), (0, 4), (1, 40), (7,), (64, 3), (9, 2, 5)], [torch.float32, torch.bfloat16, torch.int64], [1, 16, 100, 2**24]
    ),
    ids=str,
)
def test_tensors_read_in_pieces_are_whole(
    shape: tuple[int, ...], dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of the file, with memory of its own, however much of the file is mapped at a time."""
    monkeypatch.setattr("sparsellm.checkpoints.tensor_index.READ_ELEMENTS", piece)
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    save_file({"other": torch.ones(5), "wanted": tensor}, tmp_path / "some.safetensors")
    found = read_stored(TensorLocation(tmp_path / "some.safetensors", "wanted"))
    (tmp_path / "some.safetensors").write_bytes(b"")
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("piece", [1, 10, 2**22])
def test_compared_in_pieces(piece: int, tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit, one row more, another form and another dtype are each found, however few rows are read at a time."""
    monkeypatch.setattr("sparsellm.checkpoints.tensor_index.READ_ELEMENTS", piece)
    skeleton = open_checkpoint(str(tiny["llama"])).skeleton()

    def tensors(tensor: Tensor, name: str) -> StoredTensors:
        folder = tmp_path / name
        folder.mkdir()
        save_file({"x": tensor}, folder / "model.safetensors")
        return StoredTensors(folder, skeleton)

    whole = torch.arange(35.0).reshape(7, 5)
    here, bit = tensors(whole, "here"), whole.clone()
    bit[6, 4] = torch.nextafter(bit[6, 4], torch.tensor(0.0))
    others = {"same": whole, "bit": bit, "row": torch.cat([whole, whole[:1]]), "form": whole.reshape(5, 7).contiguous()}
    changed = {name: compare(here, tensors(other, name)).changed for name, other in others.items()}
    assert changed == {"same": (), "bit": ("x",), "row": ("x",), "form": ("x",)}
    wide = tensors(whole.double(), "wide")
    found = compare(here, wide)
    assert (found.changed, found.converted, found.alike) == ((), ("x",), 0)
    assert compare(tensors(whole + 1, "more"), wide).changed == ("x",)


@pytest.mark.parametrize("memory", [(), ("--offload",)], ids=["in memory", "streamed"])
def test_code_in_a_bin_file_is_refused(
    memory: tuple[str, ...], tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]
) -> None:
    """One message, nothing run, nothing written; and no advice to run it."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    torch.save({"x": Code()}, folder / "pytorch_model.bin")
    ran = command("prune", folder, tmp_path / "out", "--method", "magnitude", *memory)
    refused(ran, "holds more than tensors")
    assert "never be printed" not in ran.output
    assert not (tmp_path / "out").exists()
