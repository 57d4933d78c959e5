"""What each of several processes does in the tests: prune tiny models by every method, and keep what came of it.

Run by a launcher, `torchrun --nproc-per-node N tests/several.py FOLDER`, as tests/extensions/distributed does.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OPTConfig, PreTrainedModel

import sparsellm
from sparsellm.activations.sensitivity import output_fisher
from sparsellm.evaluation.perplexity import token_perplexity as perplexity
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.recover.block_recovery import BlockRecovery
from sparsellm.extensions.recover.training.distillation import distill, group_batches, last_states
from sparsellm.extensions.recover.training.generation import generate_samples
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.methods import LAYER_RESULT
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.saving import Result
from sparsellm.pipeline.sequential import visit_blocks
from sparsellm.runtime import collectives, devices, process_group
from sparsellm.texts.padding import split_batches

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "opt": OPTConfig(**SIZES, word_embed_proj_dim=32, ffn_dim=64, dropout=0.0),
    "llama": LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=40, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
}
LAYER_WISE = ("magnitude", "wanda", "sparsegpt", "alps")
CASES = {
    **{f"{name} {method}": (name, {"method": method}) for name in CONFIGS for method in LAYER_WISE},
    **{f"llama {method}": ("llama", {"method": method}) for method in ("fast-admm", "alps-accurate")},
    **{f"{name} sparsellm": (name, {"method": "sparsellm"}) for name in CONFIGS},
    **{f"{name} published": (name, {"method": "algorithm1"}) for name in CONFIGS},
    "opt 2:4": ("opt", {"method": "sparsegpt", "sparsity": "2:4"}),
    "opt true-sequential": ("opt", {"method": "sparsegpt", "settings": {"true_sequential": True}}),
    "mixtral true-sequential": ("mixtral", {"method": "wanda", "settings": {"true_sequential": True}}),
    "llama fast": ("llama", {"method": "sparsellm", "effort": "fast"}),
    "mixtral fisher": ("mixtral", {"method": "sparsegpt", "allocation": "fisher"}),
    "opt owl": ("opt", {"method": "wanda", "allocation": "owl"}),
    "llama padded": ("llama", {"method": "sparsellm", "settings": {"solver": "sparsegpt"}}),
    "llama recovered by block": ("llama", {"method": "sparsegpt"}),
    "llama recovered as a whole": ("llama", {"method": "sparsegpt"}),
    "llama rounded, recovered as a whole": ("llama", {"method": "magnitude", "values": "int4"}),
    "llama recovered as a whole by lora": ("llama", {"method": "sparsegpt"}),
}
"""By name: the model, and what of a recipe is not the usual."""


def tiny(name: str) -> PreTrainedModel:
    """A small random model, its outputs far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def windows(count: int, seed: int) -> torch.Tensor:
    """Token numbers, (count, 16), some of them much more frequent than others."""
    generator = torch.Generator().manual_seed(seed)
    return (96 * torch.rand(count, 16, generator=generator) ** 2).long()


def padded(count: int, seed: int) -> dict[str, torch.Tensor]:
    """As many sequences of 2 to 16 tokens, padded on the left, with their mask."""
    ids = windows(count, seed)
    return {"input_ids": ids, "attention_mask": torch.arange(16) >= torch.arange(count).unsqueeze(1) % 15}


def recovered(name: str, result: Result, whole: bool, lora: bool = False) -> PreTrainedModel:
    """The pruned model after gradient steps, over the whole of it or block after block."""
    dense, batches = tiny(name).to(result.model.device), split_batches(windows(16, 1), 2)
    plan = {layer.name: layer.pattern for layer in result.report.layers}
    if not whole:
        layers = {block.name: block.layers for block in result.report.blocks}
        method = BlockRecovery(MaskedAdam(10, 1e-3), result.model.state_dict().__getitem__, layers)
        fisher = output_fisher(dense, batches)
        list(visit_blocks(LoadedModel.of(dense), batches, method, plan, steps=partial(method.steps, plan), fisher=fisher))
        return dense
    more = generate_samples(dense, windows(16, 1), 8)
    # One by one, so that each product has the same shape in every process.
    groups, back = group_batches(windows(16, 1), more, 2, 1)
    adam, train = MaskedAdam(8, 1e-3, rank=4 if lora else None), "lora" if lora else "full"
    rounded = [(block.scales[x.name], x) for block in result.report.blocks for x in block.layers if x.name in block.scales]
    scales = {x.name: Scales(found, IntegerFormat(x.bits or 0, x.group_size or 0)) for found, x in rounded}
    states = last_states(dense, groups)
    distill(result.model, groups, states, plan=plan, adam=adam, train=train, scales=scales, held_out=back)
    return result.model


def main(folder: Path, chosen: str = "", device: str = "cpu") -> None:
    """Fill the folder: weights and figures of each case, for each process. device: "queued" is the CPU, treated as a GPU is."""
    if device == "queued":
        device = "cpu"
        devices.queued = lambda device: True
    with process_group.init_process_group(os.environ), sdpa_kernel(SDPBackend.MATH):  # the one that every device has
        for case, (name, settings) in CASES.items():
            if chosen not in case:
                continue
            before = collectives.bytes_sent()
            recipe = {"sparsity": "60%", "device": device, "seed": 0, "batch_size": 2} | settings
            data = padded(16, 1) if "padded" in case else windows(16, 1)
            result = sparsellm.prune(tiny(name), calibration=data, **recipe)
            model = recovered(name, result, "whole" in case, "lora" in case) if "recovered" in case else result.model
            found = perplexity(model, windows(10, 2), batch=2)
            layers = [LAYER_RESULT.dump_python(layer, mode="json") for layer in result.report.layers]
            told: dict[str, object] = {"perplexity": found.value, "layers": layers}
            told["sent"] = collectives.bytes_sent() - before
            to = folder / f"{case}-{collectives.rank()}"
            save_file(
                {key: x.cpu().contiguous() for key, x in model.state_dict().items() if "lm_head" not in key},
                f"{to}.safetensors",
            )
            Path(f"{to}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
