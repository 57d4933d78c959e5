"""What goes along with a pruned model: the user's documents byte for byte, tensors that the model lacks, what is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

import sparsellm
from sparsellm import load_report, prune, recover, verify
from sparsellm.errors import BadCheckpoint, VerificationFailed
from tests.conftest import report_of

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
pytestmark = pytest.mark.filterwarnings("ignore:.* has an adapter beside its weights")  # of the calls from Python
TOKENS = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
ANEW = {"README.md", "sparsellm.json", "sparsellm-log.jsonl", "config.json", "model.safetensors"}
MORE = {
    "preprocessor_config.json": '{"size":  28}',
    "special_tokens_map.json": '{"bos_token": "<s>"}',
    "tokenizer.model": "pieces",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": save({"linear.weight": torch.ones(2, 2)}).decode("latin-1"),
    "modules.json": '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
    "figure.png": "\x89PNG",
    "USE_POLICY.md": "the policy",
    "notes.txt": "notes\r\n",
}
"""Files that go along, with what they hold."""

LEFT_OUT = {
    "model.onnx": "weights that are not loaded",
    "consolidated.safetensors": "weights that are not loaded",
    "pytorch_model.bin": "weights that are not loaded",
    "optimizer.pt": "the state of a training",
    "training_args.bin": "the state of a training",
    "adapter_config.json": "an adapter, which is no part of the model",
    "modeling_own.py": "code, which goes along with --trust-remote-code",
    "checkpoint-5/config.json": "another checkpoint",
    "checkpoint-5/model.safetensors": "weights that are not loaded",
}
"""Files that do not, with the reason."""


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def dense(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A Llama as transformers 4 wrote it, with files and tensors that transformers does not know, and a buffer."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path / "dense"))
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"] * 2
    fields["torch_dtype"] = fields.pop("dtype")
    fields["transformers_version"] = "4.42.3"
    (folder / "config.json").write_text(json.dumps(fields, indent=1))  # other white space than transformers writes
    for name, text in (MORE | dict.fromkeys(LEFT_OUT, "x")).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1"))
    stored = tensors(folder)
    stored |= {
        f"model.layers.3.{name.split('.', 3)[3]}": x.clone() for name, x in stored.items() if name.startswith("model.layers.2.")
    }
    stored["mtp.eh_proj.weight"] = torch.randn(8, 16).bfloat16()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def carried(folder: Path) -> set[str]:
    """Names of the stored tensors that the model does not have."""
    return {name for name in tensors(folder) if name.startswith(("mtp.", "model.layers.3."))}


def check_documents(folder: Path, dense: Path, config: bytes | None = None) -> None:
    """Every document of the dense model is there with its bytes, nothing that is left out; carried tensors have their bits."""
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files & {*MORE, *LEFT_OUT} == set(MORE)
    for name in (*MORE, "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (dense / name).read_bytes(), name
    assert (folder / "config.json").read_bytes() == (config or (dense / "config.json").read_bytes())


def check_carried(folder: Path, dense: Path) -> None:
    """The tensors that the model does not have are there bit by bit; the buffer that it computes is not."""
    names, before, after = carried(dense), tensors(dense), tensors(folder)
    assert len(names) > 5
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in names)
    assert after.keys() == before.keys() - {"model.layers.0.self_attn.rotary_emb.inv_freq"}


@pytest.mark.parametrize("offload", [False, True])
def test_a_pruned_model_is_the_dense_one_with_zeros(offload: bool, dense: Path, tmp_path: Path, command: Command) -> None:
    """Documents, tensors and names; what is left out is told; what was rounded, dropped or added since is found."""
    out = tmp_path / "out"
    ran = command("prune", dense, out, "--method", "magnitude", *(("--offload",) if offload else ()))
    assert ran.exit_code == 0, ran.stderr
    check_documents(out, dense)
    check_carried(out, dense)
    notes = " ".join(report_of(out)["notes"])
    for name, reason in LEFT_OUT.items():
        assert name in notes or "…" in notes
        assert reason in notes or "adapter" in name
    assert "has an adapter beside its weights (adapter_config.json)" in notes
    assert "tensors that the model does not use" in notes
    assert "1 buffer that the model computes itself, model.layers.0.self_attn.rotary_emb.inv_freq first, is left out" in notes
    assert verify(out, dense).converted == ""
    before, after = tensors(dense), tensors(out)
    layers = {f"{layer.name}.weight" for layer in load_report(out).layers}
    assert all((after[name] != before[name]).any() == (name in layers) for name in after)
    found = sparsellm.inspect(out, dense)
    assert (len(found.changed), found.only_here, found.only_there, found.converted) == (len(layers), (), (), ())


def test_what_is_made_of_a_pruned_model_keeps_them_too(dense: Path, tmp_path: Path) -> None:
    """A recovery by each road, packing, unpacking and the export; unpacking gives config.json back byte for byte."""
    out = prune(dense, "magnitude", "60%").save_pretrained(tmp_path / "out")
    again = recover(out, dense, TOKENS, steps=2).save_pretrained(tmp_path / "recovered")
    check_documents(again, dense)
    check_carried(again, dense)
    sparsellm.pack(out, tmp_path / "packed")
    packed = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert packed.pop("quantization_config")["quant_method"] == "sparsellm"
    assert packed == json.loads((dense / "config.json").read_text())
    check_documents(tmp_path / "packed", dense, (tmp_path / "packed" / "config.json").read_bytes())
    assert verify(tmp_path / "packed", dense).converted == ""
    sparsellm.unpack(tmp_path / "packed", tmp_path / "back")
    check_documents(tmp_path / "back", dense)
    check_carried(tmp_path / "back", dense)
    sparsellm.export(out, tmp_path / "exported", values="int8")
    check_documents(tmp_path / "exported", dense, (tmp_path / "exported" / "config.json").read_bytes())
    assert tensors(tmp_path / "exported").keys() >= carried(dense)


def test_a_change_of_the_dtype_is_told(dense: Path, tmp_path: Path, command: Command) -> None:
    """config.json changes in that one value; the note says how many tensors are rounded; verify says so, or finds it."""
    out = tmp_path / "out"
    ran = command("prune", dense, out, "--method", "magnitude", "--dtype", "bfloat16")
    assert ran.exit_code == 0, ran.stderr
    text = (dense / "config.json").read_text()
    check_documents(out, dense, text.replace('"torch_dtype": "float32"', '"torch_dtype": "bfloat16"').encode())
    check_carried(out, dense)  # in their own dtype
    found = verify(out, dense)
    assert found.converted == "bfloat16"
    printed = command("verify", out, "--against", dense).stdout
    for said in (found.compared(), " ".join(printed.split())):
        assert "all other tensors equal those of dense after rounding to bfloat16" in said
    fields = json.loads(text) | {"torch_dtype": "bfloat16"}
    (dense / "config.json").write_text(json.dumps(fields))
    other = prune(dense, "magnitude", "50%").save_pretrained(tmp_path / "other")
    (note,) = (note for note in report_of(other)["notes"] if "rounded" in note)
    assert note.endswith("are stored in float32 and are rounded to bfloat16, as config.json says; `dtype='float32'` keeps them")
    assert verify(other, dense).converted == "bfloat16"
    report = report_of(other)
    assert report["dtype_changed"] is True
    kept = prune(dense, "magnitude", "50%", dtype="float32").save_pretrained(tmp_path / "kept")
    assert verify(kept, dense).converted == ""
    assert json.loads((kept / "config.json").read_text())["torch_dtype"] == "float32"


def silent(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """An output whose files and report agree, as one that a run wrote in silence."""
    from sparsellm.outputs.verification import proven

    report = report_of(folder)
    change(report)
    for name in ("files", "digests"):
        del report[name]
    (folder / "sparsellm.json").unlink()
    (folder / "sparsellm.json").write_text(json.dumps(proven(folder, report)))
    return folder


def test_what_was_dropped_or_rounded_in_silence_is_found(dense: Path, tmp_path: Path) -> None:
    """As in outputs of earlier revisions, whose reports hold nothing of it."""
    dropped = prune(dense, "magnitude", "50%").save_pretrained(tmp_path / "dropped")
    kept = {name: x for name, x in tensors(dropped).items() if not name.startswith("mtp.")}
    save_file(kept, dropped / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationFailed, match=r"mtp\.eh_proj\.weight"):
        verify(silent(dropped, lambda report: None), dense)
    rounded = prune(dense, "magnitude", "50%", dtype="bfloat16").save_pretrained(tmp_path / "rounded")
    with pytest.raises(VerificationFailed, match="dtype"):
        verify(silent(rounded, lambda report: report.pop("dtype_changed")), dense)


def test_masks_of_gpt2_are_no_parameters(tmp_path: Path) -> None:
    """Older versions stored them; they are neither counted, nor compared, nor written."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "old")
    masks = {f"h.{n}.attn.bias": torch.ones(32, 32).tril().bool().view(1, 1, 32, 32) for n in range(2)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    stored = {name.removeprefix("transformer."): x for name, x in tensors(tmp_path / "plain").items()}
    save_file(stored | masks, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    plain, old = (sparsellm.inspect(tmp_path / name) for name in ("plain", "old"))
    assert (plain.parameters, plain.zeros) == (old.parameters, old.zeros)
    out = prune(tmp_path / "old", "magnitude", "50%").save_pretrained(tmp_path / "out")
    assert tensors(out).keys() == stored.keys()  # without the prefix, as they came
    assert verify(out, tmp_path / "old").tensors == len(stored)


def test_one_file_becomes_one_file_and_shards_stay_shards(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Weight files have the source's tensors each; tied tensors that are stored twice stay so."""
    shards = Path(shutil.copytree(tiny["llama"], tmp_path / "shards"))
    stored = tensors(shards)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    (shards / "model.safetensors").unlink()
    parts = [{name: x for name, x in stored.items() if ("layers.1" in name) == second} for second in (False, True)]
    places = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(part, shards / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    for settings in ({}, {"offload": True}):
        out = tmp_path / f"out-{len(settings)}"
        ran = prune(shards, "magnitude", "50%", **settings) if not settings else None
        if ran is None:
            from sparsellm.outputs.journal import work_directory
            from sparsellm.pipeline.prune import prune_run
            from sparsellm.recipes.file import read_recipe

            recipe = read_recipe({"model": str(shards), "method": "magnitude", **settings})
            with work_directory(out, resume=False, restart=False) as work:
                prune_run(recipe, work=work).save_pretrained(out)
        else:
            ran.save_pretrained(out)
            written = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
            assert written == places
        assert tensors(out).keys() == stored.keys()
        assert verify(out, shards).converted == ""


@pytest.mark.parametrize("offload", [False, True])
def test_a_byte_order_mark_in_config(offload: bool, dense: Path, tmp_path: Path, command: Command) -> None:
    """Is read as texts are; the output has the same text without the mark, which transformers does not read."""
    text = (dense / "config.json").read_bytes()
    (dense / "config.json").write_bytes(b"\xef\xbb\xbf" + text)
    ran = command("prune", dense, tmp_path / "out", "--method", "magnitude", *(("--offload",) if offload else ()))
    assert ran.exit_code == 0, ran.stderr
    check_documents(tmp_path / "out", dense, text)


def test_a_pointer_of_git_lfs(dense: Path) -> None:
    """Named as such, whichever file it stands for."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        saved = (dense / name).read_bytes()
        (dense / name).write_bytes(pointer)
        with pytest.raises(BadCheckpoint, match=rf"{name} .*git lfs pull"):
            prune(dense, "magnitude", "50%")
        (dense / name).write_bytes(saved)
    for name in ("pytorch_model.bin", "model.onnx", ".git/objects/pointer"):  # of which nothing is read
        (dense / name).parent.mkdir(parents=True, exist_ok=True)
        (dense / name).write_bytes(pointer)
    assert prune(dense, "magnitude", "50%").report.sparsity == 0.5
