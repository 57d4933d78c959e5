"""`pack(embeddings="int8")`: embeddings and head are rounded, nothing else is, and every command reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.packed.formats.linear import PackedLinear
from tests.conftest import TEXT
from tests.core.integration.test_families import CONFIGS
from tests.outputs import tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:.*take dense memory")


@pytest.fixture(scope="module", params=["llama", "opt"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pruned model with a head of its own, or a tied one, and its packed form."""
    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).bfloat16()
    model.save_pretrained(root / "dense")
    sparsellm.prune(root / "dense", "magnitude", 0.6, output=root / "pruned")
    sparsellm.pack(root / "pruned", root / "packed", embeddings="int8")
    return root / "pruned", root / "packed"


def test_embeddings_and_head_are_rounded_and_nothing_else(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The error of a weight is at most half a step of 127 in its row, rounded to bfloat16 once more."""
    pruned, packed = folders
    sparsellm.unpack(packed, tmp_path / "back")
    before, after = tensors_of(pruned), tensors_of(tmp_path / "back")
    model = AutoModelForCausalLM.from_pretrained(pruned)
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    wanted = {name for name in before if any(torch.equal(before[name], module.weight) for module in modules)}
    assert len(wanted) == 2 - model.config.tie_word_embeddings
    assert {name for name in before if not torch.equal(before[name], after[name])} == wanted
    for name in wanted:
        old, new = before[name].float(), after[name].float()
        assert ((old - new).abs() <= old.abs().amax(1, keepdim=True) / 127).all()
    assert sparsellm.verify(packed).tensors == len(before)
    verified = sparsellm.verify(packed, pruned)
    assert verified.rounded_outside == len(wanted)
    assert f"all other tensors but {len(wanted)} that were rounded since equal those of pruned" in verified.compared()
    assert sparsellm.verify(pruned, pruned.with_name("dense")).rounded_outside == 0
    assert sparsellm.verify(tmp_path / "back").tensors == len(before)


def test_the_loaded_model_computes_as_the_unpacked_one(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A head of its own runs packed. What transformers saves of the loaded model has the same tensors."""
    _, packed = folders
    sparsellm.unpack(packed, tmp_path / "back")
    dense, model = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), sparsellm.load(packed)
    assert isinstance(model.get_output_embeddings(), PackedLinear) == (not model.config.tie_word_embeddings)
    tokens = torch.arange(16).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits.float(), dense(tokens).logits.float(), rtol=0.05, atol=0.02)
    model.save_pretrained(tmp_path / "again")
    sparsellm.unpack(tmp_path / "again", tmp_path / "twice")
    twice = tensors_of(tmp_path / "twice")
    assert all(torch.equal(x, twice[name]) for name, x in tensors_of(tmp_path / "back").items())


def test_integers_of_a_run_stay_exact(tmp_path: Path) -> None:
    """With a model that `--bits` rounded, a third of the bytes go, and the perplexity stays."""
    settings = {"calibration": "demo", "samples": 2, "sequence_length": 64}
    output = sparsellm.prune("demo:llama", bits=3, effort="fast", **settings, output=tmp_path / "model")
    exact, smaller = (sparsellm.pack(output.folder, tmp_path / str(x), embeddings=x) for x in (None, "int8"))
    assert smaller.packed_bytes < 0.75 * exact.packed_bytes
    layers = [{x.name: x.packed_bytes for x in result.packed if "layers." in x.name} for result in (exact, smaller)]
    assert layers[0] == layers[1]
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    found = [
        sparsellm.evaluate(tmp_path / name, text, sequence_length=64).perplexity[str(text)].value for name in ("None", "int8")
    ]
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_bad_input(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"embeddings.*int9"):
        sparsellm.pack(folders[0], tmp_path / "no", embeddings="int9")
    with pytest.raises(InvalidSetting, match="zeros"):
        sparsellm.pack("demo:opt", tmp_path / "no", embeddings="int8")
    assert not (tmp_path / "no").exists()
