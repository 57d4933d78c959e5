"""Calibration data in the forms that people have it in: chats, data sets, loaders, batches; and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import sparsellm
from sparsellm.errors import BadText, InvalidSetting
from sparsellm.texts.in_memory import is_plain_text, read_in_memory
from sparsellm.texts.padding import PADDING
from sparsellm.texts.rows import Conversation
from sparsellm.texts.samples import calibration_windows, test_windows
from sparsellm.texts.texts import Text, read_text
from tests.conftest import byte_tokenizer, extensions

if TYPE_CHECKING:
    from typer.testing import Result

TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}</s>{% endfor %}"
)
LENGTHS = (9, 4, 6)


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"what is {number}"}, {"role": "assistant", "content": "a number " * (number + 1)}]


def written(number: int) -> str:
    """The chat as the template writes it."""
    return f"<s>[user] what is {number}</s>[assistant] {'a number ' * (number + 1)}</s>"


def chatty() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(data: Any, field: str | None = None, samples: int = 8) -> Any:
    return read_in_memory(data, field, samples=samples, seed=0)


def rows() -> list[Tensor]:
    return [torch.arange(first, first + length) for first, length in zip((10, 40, 70), LENGTHS, strict=True)]


WINDOWS = torch.nn.utils.rnn.pad_sequence(rows(), batch_first=True, padding_value=PADDING)
IDS, MASK = WINDOWS.clamp(min=0), (WINDOWS != PADDING).long()


# ---- token ids


@pytest.mark.parametrize(
    "data",
    [
        rows(),
        [row.unsqueeze(0) for row in rows()],
        [row.int().numpy() for row in rows()],
        [row.tolist() for row in rows()],
        {"input_ids": IDS, "attention_mask": MASK},
        {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1).bool()},
        {"input_ids": IDS.tolist(), "attention_mask": MASK.tolist()},
        {"input_ids": [row.tolist() for row in rows()]},
        [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows()],
        datasets.Dataset.from_dict({"input_ids": IDS.tolist(), "attention_mask": MASK.tolist(), "text": ["a"] * 3}),
        datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in rows()]}).with_format("torch"),
        datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in rows()]}).to_iterable_dataset(),
        DataLoader(rows(), batch_size=1),  # type: ignore[arg-type]
        DataLoader([{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(IDS, MASK, strict=True)], batch_size=2),  # type: ignore[arg-type]
    ],
    ids=lambda data: type(data).__name__,
)
def test_token_ids_in_every_form(data: Any) -> None:
    """The sequences, with the mark of padding after the end of shorter ones."""
    windows = read(data)
    if isinstance(data, dict) and bool((torch.as_tensor(data["input_ids"][0]) != IDS[0]).any()):
        assert sorted(windows[1].tolist()) == sorted(WINDOWS[1].tolist())  # flipped: padded on the left
        assert windows[1].tolist() == [43, 42, 41, 40, *[PADDING] * 5]
    else:
        assert sorted(windows.tolist()) == sorted(WINDOWS.tolist())
    assert windows.dtype == torch.long


def test_a_batch_of_a_tokenizer() -> None:
    """What a tokenizer returns: padded on either side, and a single text."""
    tokenizer = byte_tokenizer()
    for side in ("left", "right"):
        tokenizer.padding_side = side
        windows = read(tokenizer(["abc", "defgh"], padding=True, return_tensors="pt"))
        assert [[token for token in row if token != PADDING] for row in windows.tolist()] == [
            tokenizer("abc")["input_ids"],
            tokenizer("defgh")["input_ids"],
        ]
    assert read(tokenizer("abc")).tolist() == [tokenizer("abc")["input_ids"]]


def test_tensors_of_one_length_and_of_a_data_set() -> None:
    """A tensor of (samples, length) as it is; a loader over a TensorDataset yields lists of one tensor."""
    ids = torch.arange(12).reshape(3, 4)
    for data in (ids, ids.int(), ids.numpy(), DataLoader(TensorDataset(ids), batch_size=2), [ids[:2], ids[2:]]):
        assert torch.equal(read(data), ids)
    assert read(np.arange(4)).tolist() == [[0, 1, 2, 3]]


def test_how_much_is_read() -> None:
    """All of a list; of a data set `samples` rows at random; the first `samples` sequences of an iterable without end."""

    def endless() -> Iterator[dict[str, Tensor]]:
        while True:
            yield {"input_ids": torch.ones(3, 4, dtype=torch.long)}

    assert len(read([torch.arange(4)] * 20, samples=5)) == 20
    assert len(read(endless(), samples=5)) == 5
    data = datasets.Dataset.from_dict({"input_ids": [[number, number] for number in range(100)]})
    first, again = read(data, samples=5)[:, 0].tolist(), read(data, samples=5)[:, 0].tolist()
    assert first == again
    assert len(set(first)) == 5
    assert max(first) > 20


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"input_ids": IDS, "attention_mask": MASK[:, :5]}, r"`input_ids`.*\(3, 9.*`attention_mask`.*\(3, 5"),
        ({"input_ids": IDS, "attention_mask": MASK[0]}, r"`attention_mask`.*\(9,\)"),
        ({"input_ids": IDS, "attention_mask": [[1], [1]]}, "`attention_mask`.*2 lists of 1 to 1"),
        ({"input_ids": IDS, "attention_mask": MASK.float()}, "`attention_mask`.*float32"),
        ({"input_ids": IDS, "attention_mask": 2 * MASK}, "`attention_mask`.*ones"),
        ({"input_ids": IDS, "attention_mask": 0 * MASK}, "`attention_mask`.*ones"),
        ({"input_ids": IDS, "attention_mask": -MASK}, "`attention_mask`.*ones"),
        ({"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 0]])}, "`attention_mask`.*ones"),
        ({"labels": IDS}, "'input_ids'.*'labels'"),
        ({"input_ids": torch.rand(2, 4)}, r"\(samples, length\).*\(2, 4\) torch.float32"),
        (IDS.unsqueeze(0), r"\(samples, length\).*\(1, 3, 9\)"),
        (WINDOWS, "negative.*`attention_mask`"),
        ([torch.arange(4), torch.arange(1)], "Sequence 2 .*1 .*2"),
        ([torch.arange(4), "text"], "token ids.*str"),
        (DataLoader(TensorDataset(IDS, MASK)), "entry 1, .*2 tensors.*`input_ids`.*`attention_mask`"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})), r"data\['train'\]"),
        (datasets.Dataset.from_dict({"a": ["a"], "b": [1]}), "'input_ids'.*'a', 'b'.*`text_field`"),
        (datasets.Dataset.from_dict({"text": []}), "no text.* 0 "),
        ([], "no text.*list.* 0 "),
        (7, "int"),
        ([7.5], "entry 1, .*float"),
        ([[{"content": "no role"}]], "entry 1, .*list.*`role`"),
    ],
)
def test_what_cannot_be_read(data: Any, named: str) -> None:
    """One message that says what was got."""
    with pytest.raises(BadText, match=named) as caught:
        read(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


# ---- texts and chats


def test_texts_and_chats_in_every_form() -> None:
    """Lists, data sets and loaders of texts or chats; a data set's rows stay on disk until they are drawn."""
    texts = [f"text {number}" for number in range(4)]
    for data in (
        texts,
        tuple(texts),
        [{"text": text, "id": 1} for text in texts],
        datasets.Dataset.from_dict({"text": texts, "messages": [chat(0)] * 4}),
        datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(),
        DataLoader(texts, batch_size=3),  # type: ignore[arg-type]
        DataLoader([{"text": text} for text in texts], batch_size=3),  # type: ignore[arg-type]
    ):
        text = read(data)
        assert (list(text.documents), text.chats) == (texts, False)
    chats = [chat(number) for number in range(4)]
    for data in (
        chats,
        [{"messages": one} for one in chats],
        datasets.Dataset.from_dict({"messages": chats}),
        datasets.Dataset.from_dict({"messages": chats}).to_iterable_dataset(),
    ):
        text = read(data)
        assert ([list(one.messages) for one in text.documents], text.chats) == (chats, True)
    assert list(read(datasets.Dataset.from_dict({"text": ["a"], "story": ["b"]}), "story").documents) == ["b"]


def test_chats_are_sequences_of_their_own() -> None:
    """Each starts where the template starts, without a second start token, and is cut; no chat is drawn twice."""
    text, tokenizer = Text([Conversation(chat(number)) for number in range(6)], "", "chats", chats=True), chatty()
    ids = [tokenizer(written(number), add_special_tokens=False)["input_ids"] for number in range(6)]
    drawn = calibration_windows(text, tokenizer, samples=4, sequence_length=50, seed=0)
    lines = [[token for token in row if token != PADDING] for row in drawn.windows.tolist()]
    assert all(line in [one[:50] for one in ids] for line in lines)
    assert len({tuple(line) for line in lines}) == 4
    assert drawn.description == "4 of 6 conversations in the chat template, each cut after 50 tokens (chats), seed 0"
    every = calibration_windows(text, tokenizer, samples=99, sequence_length=500, seed=1)
    assert sorted([token for token in row if token != PADDING] for row in every.windows.tolist()) == sorted(ids)
    assert every.description.startswith("6 of 6 conversations")
    tests = test_windows(text, tokenizer, 50)
    assert [[token for token in row if token != PADDING] for row in tests.windows.tolist()] == [one[:50] for one in ids]
    stream = test_windows(text, tokenizer, 20, documents="joined", bos="no").windows.flatten().tolist()
    assert stream == [token for one in ids for token in one][: len(stream)]
    assert len(stream) > sum(map(len, ids)) - 20


def test_a_chat_without_a_template_or_unfit_for_it(tmp_path: Path) -> None:
    """One message with the file and, where a template refuses a chat, with the template's reason."""
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat(0)}))
    for windows in (
        lambda text, tokenizer: calibration_windows(text, tokenizer, samples=1, sequence_length=8, seed=0),
        lambda text, tokenizer: test_windows(text, tokenizer, 8),
    ):
        with pytest.raises(BadText, match=r"chats\.jsonl .*chat template"):
            windows(read_text(str(file), "test"), byte_tokenizer())
        text = Text([Conversation([{"role": "system", "content": "x"}])], "", "chats", chats=True)
        with pytest.raises(BadText, match=r"chats: .*row 1: no system here"):
            windows(text, chatty())


@pytest.fixture(scope="module")
def chat_model(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a chat template."""
    folder = Path(shutil.copytree(tiny["llama"], tmp_path_factory.mktemp("chat") / "llama"))
    chatty().save_pretrained(folder)
    return folder


def test_chat_files_on_the_command_line(chat_model: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    """A compressed file of chats calibrates and evaluates; block by block to the same bits."""
    file = tmp_path / "chats.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(json.dumps({"messages": chat(number)}) for number in range(9)).encode()))
    outputs = []
    for name, options in {"a": [], "b": ["--offload"]}.items():
        words = ("--calibration", file, "--sequence-length", "60", "--evaluate", file, "--evaluate-limit", "2", *options)
        done = command("prune", chat_model, tmp_path / name, "--sparsity", "50%", "--samples", "8", *words)
        assert done.exit_code == 0, done.stderr
        outputs.append({key: x for part in (tmp_path / name).glob("*.safetensors") for key, x in load_file(part).items()})
        report = json.loads((tmp_path / name / "sparsellm.json").read_text())
        assert report["calibration"].startswith("8 of 9 conversations in the chat template, each cut after 60 tokens")
    assert all(torch.equal(tensor, outputs[1][key]) for key, tensor in outputs[0].items())


def test_a_chat_file_without_a_template(tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result]) -> None:
    """One line before any work, and nothing written."""
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat(0)}))
    done = command("prune", tiny["llama"], tmp_path / "out", "--sparsity", "50%", "--calibration", file)
    assert done.exit_code == 1
    assert "holds chat messages, but the tokenizer has no chat template" in done.stderr
    assert not (tmp_path / "out").exists()


# ---- one long string


def test_a_string_is_a_text_only_where_it_plainly_is_one() -> None:
    """A line break between words, or words longer than a file name may be together; else a name or a path."""
    assert is_plain_text("one line\nanother")
    assert is_plain_text("a sentence " * 30)
    for string in ("demo", "a b.txt", "a sentence that could be a name", "x" * 5000, "folder name/" * 50, "demo\n"):
        assert not is_plain_text(string)


def test_a_long_string_calibrates_or_is_shown_in_part(tiny: dict[str, Path], command: Callable[..., Result]) -> None:
    """Text is read as such; a sentence that is no path, and endless letters, give one line with the first of them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny["llama"]), AutoTokenizer.from_pretrained(tiny["llama"])
    result = sparsellm.prune(
        model, "wanda", calibration="words and words " * 40, tokenizer=tokenizer, samples=4, sequence_length=32
    )
    assert "given in memory" in result.report.calibration
    for string in ("calibrate on this sentence, which goes on for a while but has no end", "x" * 6000, "word/" * 3000 + ".txt"):
        with pytest.raises(BadText) as caught:
            sparsellm.prune(model, "wanda", calibration=string, tokenizer=tokenizer)
        assert string not in str(caught.value)
        assert string[:50] in str(caught.value)
        assert len(str(caught.value)) < 260
        assert "\n" not in str(caught.value)
    done = command("prune", tiny["llama"], "out", "--sparsity", "50%", "--calibration", "some words\n" * 99)
    assert done.exit_code == 1
    assert len(done.stderr) < 400
    assert [line for line in done.stderr.splitlines() if "words" in line] == done.stderr.splitlines()[-1:]


# ---- test data

TOKENS = torch.randint(3, 250, (4, 32), generator=torch.Generator().manual_seed(3))
DOCUMENTS = [f"the weights of layer {n} stay where they are, and the rest of them are gone" for n in range(12)]
CHATS = [chat(n) for n in range(6)]
BATCH = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


@pytest.mark.parametrize(
    "data",
    [
        TOKENS,
        TOKENS.numpy(),
        list(TOKENS),
        TOKENS.tolist(),
        BATCH,
        [BATCH],
        datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()}),
        DataLoader(TensorDataset(TOKENS), batch_size=2),
        (row for row in TOKENS),
    ],
    ids=["tensor", "array", "list of tensors", "lists", "batch", "batches", "data set", "data loader", "generator"],
)
def test_token_ids_are_measured_in_every_form(data: Any, tiny: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    found = sparsellm.evaluate(model, data)
    measured = found.perplexity["given in memory"]
    assert measured.value == sparsellm.perplexity(model, TOKENS).value
    assert "on 4 sequences of 32 tokens, given in memory" in str(found)


@pytest.mark.parametrize("form", ["list", "tuple", "string", "data set", "objects", "Path", "generator"])
def test_texts_are_measured_in_every_form(form: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """As the same documents in a file."""
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    forms: dict[str, Any] = {
        "list": DOCUMENTS,
        "tuple": tuple(DOCUMENTS),
        "string": "\n\n".join(DOCUMENTS),
        "data set": datasets.Dataset.from_dict({"text": DOCUMENTS}),
        "objects": [{"text": text} for text in DOCUMENTS],
        "Path": file,
        "generator": (text for text in DOCUMENTS),
    }
    settings: dict[str, Any] = {"sequence_length": 32}
    expected = sparsellm.evaluate(str(tiny["llama"]), str(file), **settings).perplexity[str(file)]
    (found,) = sparsellm.evaluate(str(tiny["llama"]), forms[form], **settings).perplexity.values()
    assert (found.value, found.windows) == (expected.value, expected.windows)


def test_chats_are_measured(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": x}) + "\n" for x in CHATS), encoding="utf-8")
    (expected,) = sparsellm.evaluate(str(chat_model), file).perplexity.values()
    for data in (CHATS, [{"messages": x} for x in CHATS], datasets.Dataset.from_dict({"messages": CHATS})):
        (found,) = sparsellm.evaluate(str(chat_model), data).perplexity.values()
        assert (found.value, found.windows) == (expected.value, expected.windows)


@extensions
@pytest.mark.parametrize("data", [TOKENS, DOCUMENTS, datasets.Dataset.from_dict({"text": DOCUMENTS})])
def test_a_run_measures_on_data_in_memory(data: Any, tiny: dict[str, Path], tmp_path: Path) -> None:
    """`prune`, also several sparsities with data that can be read only once, `plan` and `recover`, as `evaluate` does."""
    folder, size = str(tiny["llama"]), {"samples": 4, "sequence_length": 32}
    dense = sparsellm.evaluate(folder, data, sequence_length=32).perplexity["given in memory"].value
    results = sparsellm.prune(folder, "wanda", ["50%", "60%"], calibration=DOCUMENTS, evaluate=iter(data), **size)
    assert [x.report.perplexity["given in memory"]["dense"].value for x in results] == [dense, dense]
    results[1].save_pretrained(tmp_path / "out")
    pruned = sparsellm.evaluate(str(tmp_path / "out"), data, sequence_length=32).perplexity["given in memory"].value
    assert results[1].report.perplexity["given in memory"]["pruned"].value == pruned
    assert sparsellm.plan(folder, "wanda", calibration="demo", evaluate=data, **size).fits
    other = TOKENS.flip(0, 1)
    result = sparsellm.recover(tmp_path / "out", folder, DOCUMENTS, steps=1, evaluate=other, **size)
    before = sparsellm.evaluate(str(tmp_path / "out"), other).perplexity["given in memory"].value
    assert result.report.before("given in memory").value == before  # not what `prune` measured on other data


@extensions
def test_data_with_names_are_called_by_them(tiny: dict[str, Path], tmp_path: Path) -> None:
    """In results, tables and cards; each of them as the same data alone, or as the file that it names."""
    folder, text, file = str(tiny["llama"]), "\n\n".join(DOCUMENTS), tmp_path / "documents.txt"
    file.write_text(text)
    data = {"valid": text, "ids": TOKENS, "texts": DOCUMENTS, "file": file}
    found = sparsellm.evaluate(folder, data, sequence_length=32, against=folder)
    for name, x in data.items():
        (expected,) = sparsellm.evaluate(folder, x, sequence_length=32).perplexity.values()
        assert (found.perplexity[name].value, found.perplexity[name].source) == (expected.value, name)
    assert "32 tokens of valid" in str(found)
    size = {"samples": 4, "sequence_length": 32, "calibration": DOCUMENTS}
    result = sparsellm.prune(folder, "wanda", evaluate={"valid": text, "ids": iter(TOKENS)}, **size)
    assert [*result.report.perplexity] == ["valid", "ids"]
    result.save_pretrained(tmp_path / "out")
    assert "valid" in (tmp_path / "out" / "README.md").read_text()
    assert sparsellm.load_report(tmp_path / "out").perplexity["valid"]["dense"].value == found.perplexity["valid"].value
    again = sparsellm.recover(tmp_path / "out", folder, DOCUMENTS, steps=1, evaluate={"valid": TOKENS}, samples=4)
    assert again.report.before("valid").value != result.report.perplexity["valid"]["pruned"].value  # of other data


def test_one_perplexity_of_any_text(tiny: dict[str, Path]) -> None:
    """`perplexity` takes what `evaluate` takes; of token ids and a model in memory it has options of its own."""
    folder, text = str(tiny["llama"]), "\n\n".join(DOCUMENTS)
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for data in (text, DOCUMENTS, {"valid": text}, TOKENS.tolist()):
        (expected,) = sparsellm.evaluate(model, data, tokenizer=words, sequence_length=32).perplexity.values()
        assert sparsellm.perplexity(model, data, tokenizer=words, sequence_length=32).value == expected.value
        assert sparsellm.perplexity(folder, data, sequence_length=32).value == expected.value
    assert sparsellm.perplexity(folder, "demo", sequence_length=32, evaluate_limit=2).source == "demo"
    with pytest.raises(InvalidSetting, match="tokenizer"):
        sparsellm.perplexity(model, text)
    with pytest.raises(BadText, match="No text is called"):
        sparsellm.perplexity(model, "a sentence without an end", tokenizer=words)
    with pytest.raises(InvalidSetting, match="got 2"):
        sparsellm.perplexity(folder, {"one": text, "other": text}, sequence_length=32)
    with pytest.raises(InvalidSetting, match="a batch"):
        sparsellm.perplexity(folder, text, batch=2)


def test_a_limit_takes_the_first_sequences(tiny: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    for data in (TOKENS, datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()}), (row for row in TOKENS)):
        found = sparsellm.evaluate(model, data, evaluate_limit=2).perplexity["given in memory"]
        assert found.value == sparsellm.perplexity(model, TOKENS[:2]).value


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (3, "test text .*int"),
        (TOKENS.float(), "test text, entry 1, .*float32"),
        (TOKENS.repeat(1, 3), "96.*64"),
        (TOKENS[:, :1], "Sequence 1 .*1 .*2"),
        ([" ", "\n \n"], "test text .*no text"),
        (iter([]), "test text .*no text"),
        (["demo", "a sentence that is no name"], "'a sentence that is no name'"),
        (["nothing", "else"], "'nothing'"),
    ],
)
def test_test_data_that_cannot_be_read(data: Any, named: str, tiny: dict[str, Path]) -> None:
    with pytest.raises(BadText, match=named):
        sparsellm.evaluate(str(tiny["llama"]), data)


def test_the_command_line_measures_on_names_only(tiny: dict[str, Path], command: Callable[..., Result]) -> None:
    done = command("evaluate", tiny["llama"], "--text", "a sentence that is no name")
    assert done.exit_code == 1
    assert "No text is called 'a sentence that is no name'" in done.stderr
