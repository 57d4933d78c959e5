"""Where sequences begin: whole documents, the BOS token, repeats, long texts; and what the run says of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import Result

import sparsellm
from sparsellm.errors import BadText, InvalidSetting
from sparsellm.evaluation.perplexity import token_perplexity as perplexity
from sparsellm.pipeline.evaluate import evaluate
from sparsellm.texts import samples, tokenized
from sparsellm.texts.padding import PADDING, count_contexts
from sparsellm.texts.samples import Sequences, calibration_windows, test_windows
from sparsellm.texts.texts import Text, read_text
from sparsellm.texts.tokenized import added_tokens, tokenize
from tests.conftest import byte_tokenizer, extensions, report_of
from tests.core.integration.test_samples import BOS, counting, runs, tokenizer, written

Command = Callable[..., Result]

NUMBERS = Text([counting(0, 30), counting(100, 9), counting(200, 0), counting(300, 40)], " ", "numbers")
STREAM = [10 + number for document in NUMBERS.documents for number in map(int, str(document).split())]


def without_bos() -> PreTrainedTokenizerFast:
    """As `tokenizer`, but with no token before a text."""
    result = tokenizer()
    result.backend_tokenizer.post_processor = None
    return result


def rows(sequences: Sequences) -> list[list[int]]:
    return [[token for token in row if token != PADDING] for row in sequences.windows.tolist()]


def calibrate(text: Text, words: PreTrainedTokenizerFast, samples: int = 8, length: int = 6, **how: Any) -> Sequences:
    return calibration_windows(text, words, samples=samples, sequence_length=length, seed=0, **how)


# ---- whole documents


def test_whole_documents() -> None:
    """Each from its start as the tokenizer begins it, cut at the length; in the order of the text for perplexity."""
    expected = [[BOS, *range(10, 29)], [BOS, *range(110, 119)], [BOS, *range(310, 329)]]
    tests = test_windows(NUMBERS, tokenizer(), 20, documents="whole")
    assert rows(tests) == expected
    assert tests.description == "3 documents, each from its start, cut after 20 tokens (numbers)"
    assert rows(test_windows(NUMBERS, tokenizer(), 20, documents="whole", limit=2)) == expected[:2]
    drawn = calibrate(NUMBERS, tokenizer(), length=20, documents="whole")
    assert sorted(rows(drawn)) == sorted(expected)
    assert drawn.description == "3 of 4 documents, each from its start, cut after 20 tokens (numbers), seed 0"
    assert "numbers has 3 of the 8 samples" in drawn.notes
    some = [
        rows(calibration_windows(NUMBERS, tokenizer(), samples=2, sequence_length=20, seed=seed, documents="whole"))
        for seed in range(9)
    ]
    assert all(row in expected for two in some for row in two)
    assert len({json.dumps(two) for two in some}) > 2
    assert rows(test_windows(NUMBERS, tokenizer(), 20, documents="whole", bos="no"))[0] == [*range(10, 30)]
    assert rows(test_windows(NUMBERS, without_bos(), 20, documents="whole", bos="yes"))[0] == [BOS, *range(10, 29)]
    assert rows(test_windows(NUMBERS, without_bos(), 20, documents="whole"))[0] == [*range(10, 30)]


def with_eos() -> PreTrainedTokenizerFast:
    """As `tokenizer`, but with EOS behind a text too."""
    result = tokenizer()
    result.eos_token = "<unk>"
    special = [("<s>", BOS), ("<unk>", result.unk_token_id)]
    result.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <unk>", special_tokens=special)
    return result


@pytest.mark.parametrize("words", [tokenizer(), with_eos()])
def test_special_tokens_of_a_text_are_not_added_again(words: PreTrainedTokenizerFast) -> None:
    """A text that begins or ends as the tokenizer would have it, as one that a chat template wrote, has the same tokens."""
    begin, end = added_tokens(words)
    plain = Text([counting(0, 30), counting(40, 12), counting(60, 9), counting(80, 20)], " ", "numbers")
    both = Text([" ".join(["<s>", x, *(["<unk>"] if end else [])]) for x in plain.documents], " ", "rendered")
    found = [rows(test_windows(x, words, 40, documents="whole")) for x in (plain, both)]
    assert found[0] == found[1] == [[*begin, *words(x, add_special_tokens=False)["input_ids"], *end] for x in plain.documents]
    found = [rows(calibrate(x, words, samples=4, length=40, documents="whole")) for x in (plain, both)]
    assert found[0] == found[1]
    assert tokenize(words, "<s> 1 2", added_tokens(words)).tolist() == [BOS, 11, 12, *end]


@pytest.mark.parametrize("how", ["documents", "stream", "long", "papers"])
def test_no_sequence_begins_with_bos_twice(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where documents with a BOS token of their own are joined: also one that starts at a document."""
    if how == "long":
        monkeypatch.setattr("sparsellm.texts.tokenized.SHORT", 100)
    size = 40 if how == "documents" else 4
    text = Text([f"<s> {counting(n, size)}" for n in range(30)], " ", "rendered", published=how == "papers")
    family = {"family": "llama"} if how == "papers" else {}
    for sequences in (
        calibrate(text, tokenizer(), samples=20, length=6, **family),
        test_windows(text, tokenizer(), 6, **family),
    ):
        assert not (sequences.windows[:, :2] == BOS).all(1).any()
        assert not any("twice" in note for note in sequences.notes)
        assert how == "papers" or (sequences.windows[:, 0] == BOS).all()


def test_ids_that_begin_with_bos_twice_are_told(tiny: dict[str, Path]) -> None:
    """They are measured as they are."""
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    ids = torch.tensor([[model.config.bos_token_id] * 2 + [5, 6, 7, 8]])
    notes: list[object] = []
    sparsellm.evaluate(model, ids, observe=notes.append)
    assert any("1 of 1 sequences" in str(note) and "BOS token twice" in str(note) for note in notes)


def test_documents_too_short() -> None:
    """One token is no sequence: left out with a note, or refused where no document has two."""
    text = Text(["1", "2 3", "4"], " ", "short")
    assert rows(test_windows(text, without_bos(), 8, documents="whole")) == [[12, 13]]
    assert test_windows(text, without_bos(), 8, documents="whole").notes == (
        "2 documents of fewer than two tokens are left out",
    )
    with pytest.raises(BadText, match=r"short .*two tokens"):
        calibrate(Text(["1", "2"], " ", "short"), without_bos(), documents="whole")


def test_parts_of_one_text_are_no_documents(tmp_path: Path) -> None:
    """Rows of a .raw file and pieces of a large .txt file; a small one is one document."""
    raw, small = (read_text(written(tmp_path, name, "1 2 3\n4 5 6\n"), "test") for name in ("a.raw", "a.txt"))
    for text in (raw, read_text(written(tmp_path, "large.txt", "1 2 3\n" * 2**19), "test")):
        with pytest.raises(BadText, match="`documents='whole'`"):
            test_windows(text, without_bos(), 8, documents="whole")
    assert rows(test_windows(small, without_bos(), 8, documents="whole")) == [[11, 12, 13, 14, 15, 16]]


def test_a_note_where_most_documents_are_shorter() -> None:
    """For joined documents; not for the papers' texts, rows of one text, or a single document."""
    text = Text([counting(10 * number, 7) for number in range(30)], " ", "records")
    note = r"most documents of records are shorter than 20 tokens \(the median has 7\).* `documents='whole'`"
    for sequences in (calibrate(text, without_bos(), length=20), test_windows(text, without_bos(), 20)):
        assert any(re.match(note, found) for found in sequences.notes), sequences.notes
    others = [
        (text, {"documents": "whole"}), (Text(text.documents, " ", "rows", rows=True), {}), (NUMBERS, {"length": 5}),
        (Text([text.stream], " ", "one"), {}), (Text(text.documents, " ", "c4", published=True), {}),
    ]  # fmt: skip
    for other, how in others:
        found = calibrate(other, without_bos(), **{"length": 20, **how})
        assert not any("shorter than" in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("parts", "told"), [([counting(3 * n, 3) for n in range(12)], True), ([counting(n, 18) for n in range(12)], False)]
)
def test_a_note_where_a_text_has_short_parts_between_blank_lines(parts: list[str], told: bool, tmp_path: Path) -> None:
    """A .txt file is one text; its parts may be texts of their own, if a sequence joins several."""
    file = tmp_path / "records.txt"
    file.write_text("\n\n".join(parts))
    text = read_text(str(file), "test")
    for sequences in (calibrate(text, without_bos(), length=20), test_windows(text, without_bos(), 20)):
        assert any("blank lines" in note and "documents='whole'" in note for note in sequences.notes) == told


def whole_perplexity(model: torch.nn.Module, sequences: list[list[int]]) -> float:
    """The exponential of the mean loss of all predictions, one sequence at a time."""
    losses: list[Tensor] = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            losses.append(cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    return math.exp(float(torch.cat(losses).mean()))


def test_perplexity_of_documents_is_weighted_by_tokens(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Padding is never seen, whole and block by block; the standard error is that of resampled documents."""
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(256, (int(n),), generator=generator).tolist() for n in torch.randint(2, 60, (40,), generator=generator)
    ]
    windows = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, sequences)], batch_first=True, padding_value=PADDING)
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"]).eval()
    found = perplexity(model, windows)
    assert math.isclose(found.value, whole_perplexity(model, sequences), rel_tol=1e-5)
    assert (found.windows, found.length, found.tokens) == (40, windows.shape[1], sum(map(len, sequences)))
    assert found.lengths == f"up to {windows.shape[1]}"
    drawn = torch.randint(40, (300, 40), generator=generator)
    values = [perplexity_of(found_losses(model, sequences), sequences, picked) for picked in drawn.tolist()]
    assert found.standard_error is not None
    assert math.isclose(float(torch.tensor(values).std()), found.standard_error, rel_tol=0.25)
    file = tmp_path / "documents.json"
    file.write_text(json.dumps(["some words", "other words of another document " * 3, "a"]))
    tokens = byte_tokenizer()
    expected = whole_perplexity(model, [tokens(text)["input_ids"][:40] for text in json.loads(file.read_text())[:2]])
    for offload in (False, True):
        how: dict[str, Any] = {"documents": "whole", "sequence_length": 40, "offload": offload}
        (result,) = evaluate(tiny["llama"], file, **how).perplexity.values()
        assert math.isclose(result.value, expected, rel_tol=1e-5)
    table = command("evaluate", tiny["llama"], "--text", file, "--documents", "whole", "--sequence-length", 40)
    assert table.exit_code == 0, table.stderr
    assert f"{expected:.0f}" in table.stdout, (expected, table.stdout)
    assert "2 x up to 40 tokens" in " ".join(table.stdout.split())
    assert "1 document of fewer than two tokens is left out" in " ".join(table.stderr.split())


_losses: dict[int, list[float]] = {}


def found_losses(model: torch.nn.Module, sequences: list[list[int]]) -> list[float]:
    """The sum of the losses of each sequence."""
    if id(model) not in _losses:
        _losses[id(model)] = [(len(one) - 1) * math.log(whole_perplexity(model, [one])) for one in sequences]
    return _losses[id(model)]


def perplexity_of(losses: list[float], sequences: list[list[int]], picked: list[int]) -> float:
    return math.exp(sum(losses[number] for number in picked) / sum(len(sequences[number]) - 1 for number in picked))


def test_whole_documents_calibrate_to_the_same_bytes_offloaded(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """The run says what its sequences are; they decide whether it can be resumed."""
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"document {number} " * (1 + number % 5)}) for number in range(12)))
    how = ("--calibration", file, "--samples", 8, "--sequence-length", 48, "--documents", "whole", "--bos", "yes")
    weights = []
    for name, more in {"a": (), "b": ("--offload",)}.items():
        done = command("prune", tiny["llama"], tmp_path / name, "--method", "wanda", *how, *more)
        assert done.exit_code == 0, done.stderr
        weights.append({key: x for part in (tmp_path / name).glob("*.safetensors") for key, x in load_file(part).items()})
        report = report_of(tmp_path / name)
        assert report["calibration"].startswith("8 of 12 documents, each from its start, cut after 48 tokens")
        assert (report["recipe"]["documents"], report["recipe"]["bos"]) == ("whole", "yes")
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())


# ---- the BOS token


def test_each_sequence_begins_with_bos_where_the_tokenizer_adds_it() -> None:
    """Of calibration and of perplexity, at any place; no token of the text is lost or doubled."""
    assert added_tokens(tokenizer()) == ([BOS], [])
    assert added_tokens(without_bos()) == ([], [])
    drawn = calibrate(NUMBERS, tokenizer(), samples=50)
    assert set(drawn.windows[:, 0].tolist()) == {BOS}
    assert {tuple(row[1:]) for row in drawn.windows.tolist()} <= {tuple(STREAM[i : i + 5]) for i in range(len(STREAM))}
    assert drawn.description.startswith("50 windows of 6 tokens, of which the first begins it, at random places of")
    assert drawn.notes[0] == "each sequence begins with <s>, as the tokenizer begins a text; `bos='no'` leaves it out"
    tests = test_windows(NUMBERS, tokenizer(), 6)
    assert set(tests.windows[:, 0].tolist()) == {BOS}
    assert tests.windows[:, 1:].flatten().tolist() == STREAM[: len(STREAM) // 5 * 5]
    long = Text([counting(100 * number, 40) for number in range(6)], " ", "long")
    inside = calibrate(long, tokenizer(), samples=6)
    assert "each at a random place of one of 6 documents" in inside.description
    assert set(inside.windows[:, 0].tolist()) == {BOS}
    assert runs(inside.windows[:, 1:])


@pytest.mark.parametrize("family", ["opt", "llama", "gemma2", "qwen3"])
def test_the_papers_windows_are_those_of_their_models(family: str) -> None:
    """c4, wikitext2 and ptb with OPT and LLaMA: special tokens where a text begins, and nowhere else, as in their code."""
    papers = Text([document for document in NUMBERS.documents if document], " ", "wikitext2 test", published=True)
    found = test_windows(papers, tokenizer(), 6, family=family)
    if family in ("opt", "llama"):
        assert found.windows.flatten().tolist() == [BOS, *STREAM][: (len(STREAM) + 1) // 6 * 6]
        assert found.notes == (
            "sequences of wikitext2 test are cut as in the papers' code, so that few begin with <s>: see `bos`",
        )
        assert test_windows(papers, without_bos(), 6, family=family).notes == ()
        assert set(test_windows(papers, tokenizer(), 6, family=family, bos="yes").windows[:, 0].tolist()) == {BOS}
    else:
        assert set(found.windows[:, 0].tolist()) == {BOS}


def test_raw_files_are_texts_of_the_papers(tmp_path: Path) -> None:
    assert read_text(written(tmp_path, "a.raw", "one\n\ntwo\n"), "test").published
    assert not read_text(written(tmp_path, "a.txt", "one\n\ntwo\n"), "test").published


def test_bos_by_name() -> None:
    """Yes and no decide for every tokenizer; one that has no such token is refused before the text is read."""
    assert test_windows(NUMBERS, tokenizer(), 6, bos="no").windows.flatten().tolist() == STREAM[: len(STREAM) // 6 * 6]
    assert set(test_windows(NUMBERS, without_bos(), 6, bos="yes").windows[:, 0].tolist()) == {BOS}
    assert set(calibrate(NUMBERS, without_bos(), bos="yes").windows[:, 0].tolist()) == {BOS}
    lacking = without_bos()
    lacking.bos_token = None
    with pytest.raises(InvalidSetting, match="`bos`"):
        calibrate(NUMBERS, lacking, bos="yes")
    assert test_windows(NUMBERS, lacking, 6).windows.flatten().tolist() == STREAM[: len(STREAM) // 6 * 6]


def test_bos_that_a_tokenizer_lacks_on_the_command_line(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny["llama"], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != "bos_token"})
    )
    done = command("prune", folder, tmp_path / "out", "--calibration", text_file, "--sequence-length", 32, "--bos", "yes")
    assert done.exit_code == 1
    assert "--bos is yes, but the tokenizer has no BOS token" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bos", ["yes", "no"])
def test_losses_are_those_of_lm_eval(bos: str, tiny: dict[str, Path]) -> None:
    """lm-eval's likelihood of a document with and without `add_bos_token` is that of a whole document with `bos` yes and no."""
    from lm_eval.models.huggingface import HFLM

    words = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"]).eval()
    documents = ["one two three", "four, five and six of seven"]
    found = perplexity(model, test_windows(Text(documents, " ", "two"), words, 64, documents="whole", bos=bos).windows)
    harness = HFLM(pretrained=model, tokenizer=words, add_bos_token=bos == "yes", batch_size=1)
    requests: list[tuple[tuple[str, str], list[int], list[int]]] = []
    for text in documents:
        ids = words(text)["input_ids"]
        context = [words.bos_token_id] if bos == "yes" else ids[:1]
        requests.append((("", text), context, ids if bos == "yes" else ids[1:]))
    total = sum(likelihood for likelihood, _ in harness._loglikelihood_tokens(requests, disable_tqdm=True))
    count = sum(len(continuation) for *_, continuation in requests)
    assert math.isclose(found.value, math.exp(-total / count), rel_tol=1e-5)
    assert harness.tok_encode("one", add_special_tokens=None)[:1] == (
        [words.bos_token_id] if bos == "yes" and added_tokens(words)[0] else words("one")["input_ids"][:1]
    )


@extensions
def test_generated_sequences_begin_as_the_calibration_sequences(tiny: dict[str, Path]) -> None:
    """With BOS where all of those do; otherwise with what stands at a random place."""
    from sparsellm.extensions.recover.training.generation import generate_samples

    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    windows = torch.randint(10, 250, (6, 32), generator=torch.Generator().manual_seed(0))
    free = generate_samples(model, windows, 8)
    assert len(set(free[:, 0].tolist())) > 1
    windows[:, 0] = BOS
    begun = generate_samples(model, windows, 8)
    assert set(begun[:, 0].tolist()) == {BOS}
    assert len(set(begun[:, 1].tolist())) > 1


# ---- repeats, unknown tokens, and texts without tokens


def test_repeats_are_counted() -> None:
    """Each token is counted once, also where sequences overlap: the note says how often each is seen."""
    text = Text([counting(0, 40)], " ", "forty")
    drawn = calibrate(text, without_bos(), samples=100, length=20)
    assert drawn.notes == ("100 sequences of 20 tokens from 40: each is seen 50 times",)
    few = calibrate(text, without_bos(), samples=3, length=10)
    assert few.notes == ()


def test_notes_reach_the_report(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """Too few tokens are counted without repeats, and more samples of such a text are no advice."""
    file = tmp_path / "short.txt"
    file.write_text("a text of thirty-four characters.\n")
    how = ("--calibration", file, "--samples", 64, "--sequence-length", 32, "--method", "sparsegpt")
    done = command("prune", tiny["llama"], tmp_path / "out", *how)
    assert done.exit_code == 0, done.stderr
    notes = report_of(tmp_path / "out")["notes"]
    assert "64 sequences of 32 tokens from 34: each is seen 60 times" in notes
    few = next(note for note in notes if "different calibration tokens" in note)
    drawn = calibration_windows(
        read_text(str(file), "calibration"),
        AutoTokenizer.from_pretrained(tiny["llama"]),
        samples=64,
        sequence_length=32,
        seed=0,
    )
    assert int(few.split()[0]) == count_contexts(drawn.windows)
    assert "samples" not in few


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_different_tokens(length: int) -> None:
    """Counted with the two tokens before each in its sequence, and without padding; a repeated word has 3."""
    windows = torch.randint(3, (50, length), generator=torch.Generator().manual_seed(0))
    windows[7, 1:] = windows[9, 4:] = PADDING
    rows = [[token for token in row if token != PADDING] for row in windows.tolist()]
    assert count_contexts(windows) == len({tuple(row[max(0, at - 2) : at + 1]) for row in rows for at in range(len(row))})
    assert count_contexts(torch.full((50, length), 200_000)) == min(length, 3)


@pytest.mark.parametrize("method", ["sparsellm", "sparsegpt"])
def test_too_few_tokens_to_tell_inputs_apart(tiny: dict[str, Path], method: str, tmp_path: Path) -> None:
    """From one repeated word, or few tokens, the default is magnitude pruning, and says so; baselines stay what they are."""
    file = tmp_path / "words.txt"
    file.write_text("m" * 2000)
    by_magnitude = sparsellm.prune(tiny["llama"], "magnitude", "50%").model.state_dict()
    for settings in ({"calibration": str(file), "samples": 8}, {"calibration": torch.arange(2, 6).view(1, 4)}):
        result = sparsellm.prune(tiny["llama"], method, "50%", sequence_length=32, **settings)
        assert any("different calibration tokens" in note for note in result.report.notes)
        same = all(torch.equal(tensor, by_magnitude[name]) for name, tensor in result.model.state_dict().items())
        assert same == (method == "sparsellm") == any("too few tokens" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("known", "note"), [(19, ""), (18, "10 % of the tokens of words are unknown to the tokenizer (<unk>)")]
)
def test_unknown_tokens_are_told(known: int, note: str) -> None:
    """From a twentieth on in a note; with a half, the text is refused."""
    text = Text([" ".join(["1"] * known + ["x"] * (20 - known))] * 2, " ", "words")
    found = test_windows(text, without_bos(), 20)
    expected = note or "5 % of the tokens of words are unknown to the tokenizer (<unk>)"
    assert expected in found.notes
    with pytest.raises(BadText, match=r"7\d % .*words .*<unk>"):
        calibrate(Text(["1 x x x"] * 9, " ", "words"), without_bos())
    assert not any("unknown" in note for note in test_windows(Text(["1"] * 99 + ["x"], " ", "words"), without_bos(), 20).notes)


def test_a_tokenizer_that_makes_no_tokens() -> None:
    """The tokenizer is named as the reason, not the text."""
    empty = without_bos()
    empty.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace(
        __import__("tokenizers").Regex(".|\\n"), ""
    )
    for find in (lambda: calibrate(NUMBERS, empty), lambda: test_windows(NUMBERS, empty, 6)):
        with pytest.raises(BadText, match=r"tokenizer .*numbers"):
            find()


def test_a_token_without_an_embedding_is_named(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "model"
    words = byte_tokenizer()
    words.add_tokens(["<|known|>", "<|strange|>"])
    shutil.copytree(tiny["llama"], folder)
    words.save_pretrained(folder)
    file = tmp_path / "text.txt"
    file.write_text("some words and <|strange|> others " * 20)
    for done in (
        command("prune", folder, tmp_path / "out", "--calibration", file, "--sequence-length", 32),
        command("evaluate", folder, "--text", file, "--sequence-length", 32),
    ):
        assert done.exit_code == 1
        assert "('<|strange|>'), but" in " ".join(done.stderr.split()), done.stderr


# ---- long texts


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Texts of more than 2,000 characters are long."""
    for module in (samples, tokenized):
        monkeypatch.setattr(module, "SHORT", 2000)
    return 2000


def counted(words: PreTrainedTokenizerFast, calls: list[int]) -> Any:
    """The tokenizer, which records the characters of each call."""

    class Counted:
        bos_token, bos_token_id = words.bos_token, words.bos_token_id

        def __call__(self, string: str, **options: Any) -> Any:
            calls.append(len(string))
            return words(string, **options)

    return Counted()


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("kind", ["one document", "short documents", "long documents"])
def test_of_a_long_text_only_what_is_used_is_tokenized(kind: str) -> None:
    """Sequences are stretches of the text from all parts of it, whose cost does not grow with it."""
    sizes = {"one document": 5000, "short documents": 5, "long documents": 500}[kind]
    text = Text([counting(first, sizes) for first in range(0, 5000, sizes)], " ", "long")
    calls: list[int] = []
    drawn = calibrate(text, counted(tokenizer(), calls), samples=5 if sizes > 5 else 16, length=9)
    assert set(drawn.windows[:, 0].tolist()) == {BOS}
    assert runs(drawn.windows[:, 1:])
    assert len(set(drawn.windows[:, 1].tolist())) >= 4
    assert sum(calls) < len(text.stream) * 4 / 5
    assert "of one text of" in drawn.description or "each at a random place of one of" in drawn.description
    again = calibrate(text, tokenizer(), samples=5 if sizes > 5 else 16, length=9)
    assert torch.equal(again.windows, drawn.windows)
    whole = calibrate(text, tokenizer(), samples=3, length=5, documents="whole")
    assert set(whole.windows[:, 0].tolist()) == {BOS}


@pytest.mark.usefixtures("short_limit")
def test_places_of_a_long_text_are_spread_evenly() -> None:
    """In proportion to the characters, whatever the documents' lengths."""
    text = Text([counting(0, 2), *(counting(first, 3) for first in range(2, 2000, 3)), counting(2000, 2000)], " ", "uneven")
    drawn = calibrate(text, without_bos(), samples=4000, length=4)
    share = float((drawn.windows[:, 0] < 2010).float().mean())
    before = len(" ".join(map(str, range(2000)))) / len(" ".join(map(str, range(4000))))
    assert abs(share - before) < 4 * math.sqrt(before * (1 - before) / 4000)
    assert runs(drawn.windows)


@pytest.mark.usefixtures("short_limit")
def test_perplexity_of_the_start_of_a_long_text() -> None:
    """With a limit only the start is tokenized, to the same tokens; without, all of it, in pieces of whole documents."""
    text = Text([counting(first, 50) for first in range(0, 5000, 50)], " ", "long")
    calls: list[int] = []
    limited = test_windows(text, counted(tokenizer(), calls), 10, limit=4)
    assert limited.windows[:, 1:].flatten().tolist() == list(range(10, 46))
    assert sum(calls[:-64]) < 8000
    everything = test_windows(text, tokenizer(), 10)
    assert everything.windows[:, 1:].flatten().tolist() == list(range(10, 10 + 5000 // 9 * 9))


# ---- data sets on disk


def test_folders_that_save_to_disk_wrote(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """One data set, or splits, of which each purpose has its own; rows that are null are left out."""
    texts = [None if number % 5 == 0 else f"row {number} has some words of its own" for number in range(40)]
    data = Dataset.from_dict({"text": texts, "id": list(range(40))})
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data.select(range(20)), validation=data.select(range(20, 40))).save_to_disk(tmp_path / "splits")
    DatasetDict(other=data, more=data).save_to_disk(tmp_path / "others")
    assert list(read_text(str(tmp_path / "one"), "test").documents) == texts
    assert list(read_text(str(tmp_path / "splits"), "calibration").documents) == texts[:20]
    every = test_windows(read_text(str(tmp_path / "one"), "test"), byte_tokenizer(), 8, documents="whole")
    assert every.notes == ("8 rows of one are left out: 8 empty",)
    assert list(read_text(str(tmp_path / "splits"), "test").documents) == texts[20:]
    with pytest.raises(BadText, match=r"others .*'other', 'more'.*'train'"):
        read_text(str(tmp_path / "others"), "calibration")
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    with pytest.raises(BadText, match="one is not a data set"):
        read_text(str(tmp_path / "one"), "test")
    how = ("--calibration", tmp_path / "splits", "--evaluate", tmp_path / "splits", "--sequence-length", 32, "--samples", 4)
    done = command("prune", tiny["llama"], tmp_path / "out", "--method", "wanda", *how)
    assert done.exit_code == 0, done.stderr
    assert "(splits), seed 0" in report_of(tmp_path / "out")["calibration"]


def test_rows_that_are_left_out_are_told(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """By one note with their number and the reason of the first."""
    folder = tmp_path / "model"
    shutil.copytree(tiny["llama"], folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
        "{{ m.role + m.content }}{% endfor %}"
    )
    user, system = ({"role": role, "content": "some words"} for role in ("user", "system"))
    chats = [[user], [], [user, system], [system, user], [user, system]]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    done = command("prune", folder, tmp_path / "out", "--method", "wanda", "--calibration", file, "--sequence-length", 32)
    assert done.exit_code == 0, done.stderr
    notes = report_of(tmp_path / "out")["notes"]
    assert any(
        note.startswith("3 rows of chats.jsonl are left out: 1 empty and 2 that the chat template refuses (row ")
        for note in notes
    ), notes
    file.write_text(json.dumps({"messages": [user, system]}))
    done = command("prune", folder, tmp_path / "other", "--method", "wanda", "--calibration", file, "--sequence-length", 32)
    assert done.exit_code == 1
    assert "no conversation fits the tokenizer's chat template (row 1: system first)" in " ".join(done.stderr.split())
