"""Layers chosen by glob, regular expression, type and role, against fnmatch and re on the names of several families."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import Result

from sparsellm.errors import InvalidSetting
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.recipes.plan import list_layers, uniform_plan
from sparsellm.recipes.selection import layer_names, name_matcher
from sparsellm.solvers.patterns import NM, Unstructured
from tests.conftest import extensions

Command = Callable[..., Result]
HALF = Unstructured(0.5)

SMALL = {
    "opt": {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 12, "num_attention_heads": 2},
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 2},
    "phi3": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0},
    "gpt_neox": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "mixtral": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    },
}


@pytest.fixture(scope="module", params=SMALL)
def blocks(request: pytest.FixtureRequest) -> list[Block]:
    """The blocks of a small model without weights."""
    with torch.device("meta"):
        config = AutoConfig.for_model(request.param, vocab_size=32, **SMALL[request.param])
        return blocks_of(AutoModelForCausalLM.from_config(config))


GLOBS = (
    "*.q_proj",
    "*.1?.*",
    "*.layers.1?.*",
    "*[qk]_proj",
    "mlp",
    "self_attn",
    "fc1",
    "*attn*",
    "down_proj",
    "layers.1",
    "*.h.0.*",
)
REGEXES = (
    r".*[qv]_proj$",
    r".*\.(0|1)\..*",
    r"model\.layers\.1\d\.",
    r".*mlp",
    r"transformer\.h\.\d+\.attn",
    r"gpt_neox.*dense$",
)


def test_patterns_choose_what_fnmatch_and_re_choose(blocks: list[Block]) -> None:
    """A glob: the full name of the layer or of a module that holds it, or the end of one. A regular expression: `re.match`."""

    def chosen(full_name: str, pattern: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], full_name) is not None
        parts = full_name.split(".")
        holders = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
        return any(fnmatchcase(name, glob) for name in holders for glob in (pattern, f"*.{pattern}"))

    layers = layer_names(blocks)
    for pattern in (*GLOBS, *(f"re:{expression}" for expression in REGEXES)):
        expected = {x.full_name for x in layers if pattern in x.labels or chosen(x.full_name, pattern)}
        if not expected:
            with pytest.raises(InvalidSetting, match="`include`"):
                uniform_plan(blocks, HALF, include=[pattern])
            continue
        assert set(uniform_plan(blocks, HALF, include=[pattern])) == expected, pattern
        rest = {layer.name for layer in list_layers(blocks, HALF, exclude=[pattern]) if layer.pattern is not None}
        assert rest == {x.full_name for x in layers} - expected, pattern


def test_globs_are_read_as_python_3_14_translates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a regular expression with another anchor."""
    translate = fnmatch.translate
    monkeypatch.setattr(fnmatch, "translate", lambda pattern: translate(pattern)[:-2] + r"\z")
    is_match = name_matcher("*.mlp", "`include`")
    assert is_match("model.layers.1.mlp.up_proj")
    assert not is_match("model.layers.1.mlps")


def test_roles_divide_the_layers_and_linear_is_every_layer(blocks: list[Block]) -> None:
    every = uniform_plan(blocks, HALF)
    attention, mlp = (set(uniform_plan(blocks, HALF, include=[role])) for role in ("attention", "mlp"))
    assert attention | mlp == set(every)
    assert not attention & mlp
    assert all("mlp" not in name and ".fc" not in name for name in attention)
    assert uniform_plan(blocks, HALF, include=["Linear"]) == every
    holder = type(
        next(module for name, module in blocks[0].module.named_modules() if name == next(iter(blocks[0].layers)).split(".")[0])
    )
    assert set(uniform_plan(blocks, HALF, include=[holder.__name__])) >= attention


def test_what_is_never_pruned_may_be_excluded(blocks: list[Block]) -> None:
    """As llm-compressor's `ignore` has it: the head, and routers where there are any; but not a name that nothing has."""
    assert uniform_plan(blocks, HALF, exclude=["lm_head"]) == uniform_plan(blocks, HALF)
    dense = [layer for layer in list_layers(blocks, HALF) if layer.reason == "router"]
    if dense:
        assert uniform_plan(blocks, HALF, exclude=["re:.*mlp.gate$"]) == uniform_plan(blocks, HALF)
    with pytest.raises(InvalidSetting, match=r"`exclude`.*'no_such_module'"):
        uniform_plan(blocks, HALF, exclude=["no_such_module"])


@pytest.mark.parametrize(
    ("include", "named"),
    [
        ("lm_head", "`include`.*'lm_head'"),  # the blocks alone
        ("q_prj", "'q_prj'.*'q_proj'"),
        ("re:(", r"`include`.*'re:\('.*missing \)"),
        ("re:q_proj", r"model\.layers\.0\.self_attn\.q_proj.*re:\.\*q_proj"),
        ("re:zz", r"model\.layers\.0\.self_attn\.q_proj\.$"),
    ],
)
def test_patterns_that_choose_nothing_are_refused_with_the_nearest_names(
    include: str, named: str, tiny: dict[str, Path], command: Command
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny["llama"]))
    with pytest.raises(InvalidSetting, match=named):
        uniform_plan(blocks_of(model), HALF, include=[include])


@extensions
def test_the_plan_lists_each_layer_with_its_pattern_or_reason(tiny: dict[str, Path], command: Command) -> None:
    words = [
        "--method",
        "magnitude",
        "--sparsity",
        "2:4",
        "--blocks",
        "-2:",
        "--exclude",
        "re:.*k_proj$",
        "--include",
        "attention",
    ]
    done = command("plan", tiny["llama"], *words, "--layers")
    assert done.exit_code == 0, done.stderr
    assert max(map(len, done.stdout.split("tiny")[0].splitlines())) <= 80
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines() if line.startswith("model.layers.")]
    stated = {row[0]: row[4] for row in rows}
    reasons = {
        "0.self_attn.q_proj": "dense: not in blocks",
        "1.self_attn.q_proj": "2:4",
        "2.self_attn.k_proj": "dense: excluded",
        "2.mlp.up_proj": "dense: not included",
    }
    assert len(stated) == 21
    assert {name: stated[f"model.layers.{name}"] for name in reasons} == reasons
    data = json.loads(command("plan", tiny["llama"], *words, "--json").stdout)["each_layer"]
    assert {x["name"]: x["pattern"] or f"dense: {x['reason']}" for x in data} == stated
    assert data[0]["shape"] == [32, 32]
    pruned = [x["name"] for x in data if x["pattern"]]
    assert len(pruned) == 6


@pytest.mark.parametrize(("family", "router"), [("qwen3_moe", "mlp.gate"), ("qwen2_moe", "mlp.shared_expert_gate")])
def test_routers_are_listed_as_dense(family: str, router: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=32, num_experts=2, moe_intermediate_size=8, **SMALL["llama"])
    with torch.device("meta"):
        blocks = blocks_of(AutoModelForCausalLM.from_config(config))
    dense = {layer.name: layer for layer in list_layers(blocks[:1], NM(2, 4)) if layer.reason}
    assert dense[f"model.layers.0.{router}"].reason == "router"
    assert dense[f"model.layers.0.{router}"].shape[1] == 16
    assert {layer.reason for layer in dense.values()} == {"router"}
