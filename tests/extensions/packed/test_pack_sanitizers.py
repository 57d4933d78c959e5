"""Changed packed models, shown to every way in while the kernels check their own addresses and arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, OPTConfig

import sparsellm
from sparsellm.extensions.packed.formats import kernels
from sparsellm.runtime import native
from tests.conftest import ROOT

INPUTS = int(os.environ.get("FUZZ_INPUTS", "250"))
"""Changed models. 20,000 take about ten minutes of a processor that is not shared."""

SIZES = {"vocab_size": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
COMMON = {"hidden_size": 72, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32, **SIZES}
CONFIGS = (
    OPTConfig(ffn_dim=136, word_embed_proj_dim=72, dropout=0.0, **COMMON),
    MixtralConfig(intermediate_size=136, num_key_value_heads=1, num_local_experts=2, **COMMON),
    GPT2Config(n_embd=72, n_layer=1, n_head=2, n_positions=32, n_inner=136, **SIZES),
)
"""With biases, with experts, and with matrices of (in, out); no width is a multiple of 64."""

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
OPTIONS = {
    "detect_leaks": 0,  # Python leaves memory to the system
    "abort_on_error": 1,
    "quarantine_size_mb": 1,  # which counts as memory
    "max_allocation_size_mb": 72,  # whatever asks for more is a report, even if it never writes there
    "malloc_context_size": 3,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, each in half of the packed forms, so that each form has one or two."""
    folder = tmp_path_factory.mktemp("bases")
    forms = [(values, archive) for values in (None, "int8", "int4", "int3") for archive in (False, True)]
    for number, config in enumerate(CONFIGS):
        torch.manual_seed(0)
        dense, pruned = (tmp_path_factory.mktemp(name) / config.model_type for name in ("dense", "pruned"))
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(dense)
        sparsellm.prune(str(dense), "magnitude", "60%").save_pretrained(pruned)
        for values, archive in forms[number % 2 :: 2] if number < 2 else forms[::3]:
            packed = folder / f"{config.model_type}-{values}-{archive}"
            sparsellm.pack(pruned, packed, values=values, archive=archive, group_size=64 if values == "int4" else None)
    return folder


@pytest.mark.long
def test_changed_models_are_refused_or_run_within_their_memory(bases: Path, tmp_path: Path) -> None:
    """No report of a sanitizer, no traceback, and no step takes more than 64 MiB beyond the size of the file."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    paths = [
        subprocess.run(["gcc", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan", "libstdc++")  # the second, since the first looks for its functions when Python starts
    ]
    if missing := [path for path in paths if not Path(path).is_file()]:
        pytest.skip(f"needs {missing[0]} of gcc")
    library, sources = tmp_path / "kernels.so", sorted(native.LIBRARY.parent.glob("*.c"))
    flags = ["-O1", "-g", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", *SANITIZERS]
    subprocess.run(["gcc", *flags, "-o", str(library), *map(str, sources)], check=True)
    (work := tmp_path / "work").mkdir()
    options = ":".join(f"{name}={value}" for name, value in OPTIONS.items())
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.packed_fuzzing", bases, work, "0", str(INPUTS), library],
        env=os.environ | {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": options},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    number = (work / "number.txt").read_text(encoding="utf-8") if (work / "number.txt").exists() else "none"
    assert done.returncode == 0, f"input {number}:\n{done.stderr[:8000]}"
    summary = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(summary, indent=1))
    assert not summary["failures"], "\n".join(f"{place}\n{text}" for place, text in summary["failures"].items())
    assert "portable" in summary["sets"]
    assert set(summary["sets"]) >= set(kernels.instruction_sets())  # these are none where the kernels are not compiled
    assert summary["inputs"] == INPUTS
    for way in ("tensors", "layers", "layer.load_state_dict", "kernels", "from_pretrained"):
        for outcome in ("refused", "right"):
            assert summary["outcomes"][f"{way} {outcome}"] > 0.02 * INPUTS
    assert summary["memory"]["MiB"] <= 64
