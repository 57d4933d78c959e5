"""Shared by the tests: tiny models on disk, a tiny text, and the command line in this process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparsellm

if TYPE_CHECKING:  # torch, transformers and typer take seconds to import: only the fixtures that need them do
    from multiprocessing.context import ForkServerContext

    from _pytest.mark import ParameterSet
    from transformers import PreTrainedTokenizerFast
    from typer import Typer
    from typer.core import TyperGroup as Command
    from typer.testing import Result

    from tests.warm_programs import Start

# Before torch is imported. The tests' models are too small for more threads, and the last bits of a sum depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ("tests.outputs",)

TEXT = "the sum of the weights that stay is what a layer can still say when the rest of them are gone"
WORDS = TEXT.split(" ")


ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
"""Models, texts and reports that are no part of the project; tests that read them skip where they are absent."""

CACHE = "XDG_CACHE_HOME"

HAS_EXTENSIONS = (Path(sparsellm.__file__).parent / "extensions").exists()
extensions = pytest.mark.extensions
"""Tests of the core that use a command, an option or a function of an extension."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the core that `tests/core_alone.sh` runs, and skip the others of the core in it.

    Those of the project come first: the longest are among them, and a long one as the last would leave other processes idle.
    """
    items.sort(key=lambda item: not item.path.is_relative_to(ROOT / "tests" / "project"))
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "core") and not item.get_closest_marker("extensions"):
            item.add_marker(pytest.mark.core)
        elif not HAS_EXTENSIONS:
            item.add_marker(pytest.mark.skip(reason="needs an extension, and only the core is installed"))


def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine once, before the workers start: all processes then choose alike, and none measures under load."""
    os.fsync = lambda descriptor: None  # no test cuts the power, and a run waits for the disk longer than it works
    if hasattr(config, "workerinput"):
        return
    os.environ[CACHE] = tempfile.mkdtemp(prefix="sparsellm-tests-")
    import torch

    from sparsellm.checkpoints.machine_cache import use_cache
    from sparsellm.models.sparse_matmul import max_density
    from sparsellm.pipeline.startup import bf16_pass_speedup
    from sparsellm.runtime import autotuning
    from sparsellm.runtime.products import bf16_solver_speedup, onednn_speedup

    use_cache()
    onednn_speedup(), bf16_solver_speedup(), max_density(), max_density(torch.bfloat16), bf16_pass_speedup(torch.device("cpu"))
    if HAS_EXTENSIONS:
        from sparsellm.extensions.packed.formats import kernels

        [kernels.is_faster(count, dtype) for count in kernels.PACKED_TOKENS for dtype in (torch.bfloat16, torch.float32)]
        [kernels.is_faster_dense(count) for count in kernels.DENSE_TOKENS]
    autotuning.keep()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Search the libraries' objects for no garbage at exit, which takes longer than most files of unit tests."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> None:
    """Runs collect garbage to free a model, and would search the objects of all libraries and tests for it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random OPT (bf16, biases) and Llama (float32) checkpoints with a byte tokenizer; not to be written to."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

    folders: dict[str, Path] = {}
    for family in ("opt", "llama"):
        torch.manual_seed(0)
        config = (
            OPTConfig(
                vocab_size=260,
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=64,
                dropout=0.0,
            )
            if family == "opt"
            else LlamaConfig(
                vocab_size=260,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=True,
            )
        )
        model = AutoModelForCausalLM.from_config(config)
        folder = tmp_path_factory.mktemp("tiny") / family
        model.to(torch.bfloat16 if family == "opt" else torch.float32).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        folders[family] = folder
    return folders


def save_small(folder: Path) -> dict[str, Path]:
    """Write a Llama of one block and width 8 with its tokenizer, dense and pruned by magnitude."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from sparsellm import prune

    folders = {"dense": folder / "dense", "pruned": folder / "pruned"}
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folders["dense"])
    byte_tokenizer().save_pretrained(folders["dense"])
    prune(str(folders["dense"]), "magnitude", "2:4").save_pretrained(folders["pruned"])
    return folders


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and a few special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousand words, no two stretches alike."""
    import torch

    generator = torch.Generator().manual_seed(1)
    picks = torch.randint(len(WORDS), (3000,), generator=generator).tolist()
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(WORDS[pick] for pick in picks), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def loud(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoints with matrices large enough that their predictions are far from even; not to be written to."""
    import shutil

    from safetensors.torch import load_file, save_file

    folders = {}
    for family, folder in tiny.items():
        folders[family] = Path(shutil.copytree(folder, tmp_path_factory.mktemp("loud") / family))
        tensors = load_file(folder / "model.safetensors")
        louder = {name: tensor * 8 if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
        save_file(louder, folders[family] / "model.safetensors", {"format": "pt"})
    return folders


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A folder with a few questions for two tasks, fields as on the hub."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    yes_no = [{"question": f"is {n} the sum", "passage": "the sum of the weights", "label": n % 2} for n in range(6)]
    choices = {"text": ["the sum", "the rest", "a layer"], "label": ["A", "B", "C"]}
    picks = [{"id": str(n), "question": f"what stays {n}", "choices": choices, "answerKey": "ABC"[n % 3]} for n in range(5)]
    for name, rows in (("boolq_validation", yes_no), ("arc_easy_test", picks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerContext]:
    from tests.processes import fork_server

    with fork_server(tmp_path_factory.mktemp("server") / "output.txt") as context:
        yield context


@pytest.fixture
def server(_server: ForkServerContext) -> Iterator[ForkServerContext]:
    """Forks processes for the command line that have torch and transformers loaded already.

    They have one thread, since more could not be forked, and so has this process in the meantime: their number decides the last
    bits.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _server
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Runs a program of Python in a process that has loaded nothing of sparsellm when it starts."""
    from tests.warm_programs import warm_programs

    with warm_programs(tmp_path_factory.mktemp("programs")) as start:
        yield start


@cache
def made_once(app: Typer) -> Command:
    """The commands of the command line, which typer would make anew for each call."""
    from typer.main import get_command

    return get_command(app)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in this process; stdout and stderr apart."""
    from typer.testing import CliRunner

    from sparsellm.cli.app import app

    monkeypatch.setattr("typer.testing._get_command", made_once)

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return run


def long_unless(quick: bool, *values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> ParameterSet:
    """A case of `pytest.mark.parametrize` that is in the long set only, unless it is quick; `marks` are further ones."""
    return pytest.param(*values, marks=[*marks, *([] if quick else [pytest.mark.long])])


def report_of(folder: Path) -> dict:
    """The report that a run left in its output."""
    return json.loads((folder / "sparsellm.json").read_text(encoding="utf-8"))
