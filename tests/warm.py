"""Imported by the server that processes.py forks from: one small run, which loads all that the others would load."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sparsellm.outputs.journal import work_directory
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.recipe import Recipe
from tests.conftest import byte_tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}

torch.set_num_threads(1)  # a process with more could not be forked
with tempfile.TemporaryDirectory() as folder:
    model, text, out = (Path(folder) / name for name in ("model", "text.txt", "out"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=32)).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    text.write_text("all that is needed " * 20)
    recipe = Recipe(
        model=str(model), method="wanda", sparsity="50%", calibration=str(text), samples=2, sequence_length=16, offload=True
    )
    with work_directory(out) as work:
        prune_run(recipe, work=work).save_pretrained(out)

os.fsync = lambda descriptor: None  # as in tests/conftest.py
gc.collect()
gc.freeze()
