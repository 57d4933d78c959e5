"""How a total is shared out by a file, exact to one weight, and what of any sharing stands in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import Result

from sparsellm.allocation.rules import round_to_total
from sparsellm.errors import InvalidSetting
from sparsellm.methods import Plan
from sparsellm.recipes.plan import plan_from_file
from sparsellm.recipes.selection import LayerName
from sparsellm.solvers.patterns import NM, Unstructured, parse_pattern
from tests.conftest import report_of

Command = Callable[..., Result]

SHAPES = {
    f"layers.{block}.{name}": shape
    for block in range(2)
    for name, shape in {"attn.q": (8, 8), "attn.o": (8, 8), "mlp.up": (12, 8), "mlp.down": (8, 12)}.items()
}
SIZES = {name: rows * columns for name, (rows, columns) in SHAPES.items()}
TOTAL = sum(SIZES.values())
LAYERS = [LayerName(name, shape, name.split(".", 2)[2]) for name, shape in SHAPES.items()]


def read(folder: Path, content: str | bytes, sparsity: str = "60%") -> Plan:
    """The plan that a file of this content makes of the layers above."""
    file = folder / "shares.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return plan_from_file(file, dict.fromkeys(SHAPES, Unstructured(0)), LAYERS, parse_pattern(sparsity))


def removed(plan: Plan) -> dict[str, int]:
    """How many weights each layer loses."""
    return {name: pattern.count_removed(SHAPES[name]) for name, pattern in plan.items()}


def test_a_file_names_patterns(tmp_path: Path) -> None:
    """The first name that matches counts, full names and their ends, shares and N:M; the rest is shared alike."""
    plan = read(tmp_path, '"attn.q": 90%\n"attn.*": 2:4\n"layers.0.*": 0.25\n')
    given = {"layers.0.attn.q": "90%", "layers.1.attn.q": "90%", "layers.0.attn.o": "2:4", "layers.1.attn.o": "2:4"}
    given |= {"layers.0.mlp.up": "25%", "layers.0.mlp.down": "25%"}
    assert list(plan) == list(SHAPES)
    assert {name: str(plan[name]) for name in given} == given
    left = 384 - 2 * 58 - 2 * 32 - 2 * 24
    assert removed(plan)["layers.1.mlp.up"] == removed(plan)["layers.1.mlp.down"] == left / 2 == 78
    assert all(abs(count - 0.6 * SIZES[name]) < 1 for name, count in removed(read(tmp_path, "{}")).items())
    assert read(tmp_path, '"*": "2:4"', "50%") == dict.fromkeys(SHAPES, NM(2, 4))
    assert sum(removed(read(tmp_path, '"attn.*": 2:4', "3:4")).values()) == 3 * TOTAL / 4


@settings(max_examples=60, deadline=None)
@given(
    named=st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(0, 99), max_size=len(SHAPES) - 1),
    share=st.integers(1, 999),
)
def test_a_files_total(named: dict[str, int], share: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All layers together lose what was asked, to one weight, those not named the same share; or the file is refused."""
    content, pattern = "".join(f'"{name}": {percent}%\n' for name, percent in named.items()) or "{}", Unstructured(share / 1000)
    rest = [name for name in SHAPES if name not in named]
    left = pattern.count_removed([TOTAL]) - sum(
        Unstructured(percent / 100).count_removed(SHAPES[name]) for name, percent in named.items()
    )
    room = sum(SIZES[name] for name in rest)
    folder = tmp_path_factory.getbasetemp()
    if 0 <= left <= room - len(rest):
        plan = read(folder, content, str(pattern))
        assert sum(removed(plan).values()) == pattern.count_removed([TOTAL])
        assert all(abs(removed(plan)[name] - left / room * SIZES[name]) < 1 for name in rest)
        assert all(plan[name] == Unstructured(percent / 100) for name, percent in named.items())
    elif not 0 <= left < room:
        with pytest.raises(InvalidSetting, match=rf"shares\.yaml .* {left:,} "):
            read(folder, content, str(pattern))


@pytest.mark.parametrize(
    ("content", "sparsity", "parts"),
    [
        ('"attn.q": 50%\n"attn.k": 50%', "60%", ("got 'attn.k'", "matches no layer", "'attn.q'")),
        ('"attn.q": 150%', "60%", ("attn.q", "150%")),
        ('"attn.q": much', "60%", ("attn.q", "'much'", "2:4")),
        ('"mlp.down": 2:4\n"attn.*": 3:5', "60%", ("layers.0.attn.q: 3:5 needs", "got 8")),
        ('"mlp.*": 0%', "90%", ("removes 0 weights", "90% of all is 576", "576 would", "256 weights", "attn.q and 3 more")),
        ('"mlp.*": 99%', "20%", ("removes 380 weights", "-252 would")),
        ('"*": 50%', "60%", ("names every layer", "50.00 %", "is 60%")),
        ('"*": 50%', "2:3", ("50.00 %", "is 2:3")),
        (b'"attn.q": "\xff"', "60%", ("cannot be read",)),
        ("attn.q: [x", "60%", ("is not YAML",)),
        ("- attn.q", "60%", ("must hold `field: value` lines",)),
        ("attn.q: {a: b}", "60%", ("attn.q", "{'a': 'b'}")),
        ("", "60%", ("must hold",)),
    ],
)  # fmt: skip
def test_files_refused(content: str | bytes, sparsity: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """What a file cannot say is refused, naming the file and what is wrong in it."""
    with pytest.raises(InvalidSetting) as caught:
        read(tmp_path, content, sparsity)
    assert all(part in str(caught.value) for part in (*parts, "shares.yaml")), str(caught.value)


def test_a_rest_of_which_one_weight_would_stay(tmp_path: Path) -> None:
    """Where two layers would have to lose all but one weight, one of them would lose all: the file is refused by name."""
    with pytest.raises(InvalidSetting, match=r"shares\.yaml"):
        read(tmp_path, '"layers.0.*": 0%\n"layers.1.attn.*": 0%', f"{100 * 191 / TOTAL}%")


def test_no_file(tmp_path: Path) -> None:
    """A file that is not there, and a folder in its place."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(InvalidSetting, match=f"{path} cannot be read"):
            plan_from_file(path, dict.fromkeys(SHAPES, Unstructured(0)), LAYERS, Unstructured(0.5))


@given(
    layers=st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=1, max_size=8),
    share=st.floats(0, 1),
)
@example(layers=[(1, 0.5), (10, 0.5), (10, 0.5)], share=0.5)
def test_exactly(layers: list[tuple[int, float]], share: float) -> None:
    """The sum is exact, no layer loses more than all but one, and one shift of all shares explains the numbers, to one."""
    sizes = {str(number): size for number, (size, _) in enumerate(layers)}
    wanted = {str(number): size * part for number, (size, part) in enumerate(layers)}
    most = sum(sizes.values()) - len(sizes)
    found = round_to_total(wanted, sizes, round(share * most))
    assert list(found) == list(sizes)
    assert sum(found.values()) == round(share * most)
    assert all(0 <= found[name] < sizes[name] for name in sizes)
    lowest = max((found[n] - 1 - wanted[n]) / sizes[n] if found[n] > 1 else -2.0 for n in sizes)
    highest = min((found[n] + 1 - wanted[n]) / sizes[n] if found[n] < sizes[n] - 1 else 2.0 for n in sizes)
    assert lowest <= highest + 1e-9
    for total in (-1, most + 1):
        with pytest.raises(InvalidSetting, match="cannot be removed"):
            round_to_total(wanted, sizes, total)
    whole = {name: min(int(wanted[name]), sizes[name] - 1) for name in sizes}
    assert round_to_total(whole, sizes, sum(whole.values())) == whole


@pytest.mark.parametrize(
    ("allocation", "method", "family"),
    [
        ("owl", "wanda", "opt"),
        ("owl", "magnitude", "llama"),
        ("fisher", "sparsegpt", "opt"),
        ("fisher", "sparsegpt", "llama"),
        ("owl", "sparsellm", "llama"),
        ("FILE", "wanda", "llama"),
        ("FILE", "sparsellm", "opt"),
    ],
)
def test_through_the_command_line(
    family: str, allocation: str, method: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """The checkpoint holds each layer's own pattern, as the report says; inspect takes the total, and no more."""
    out = tmp_path / "out"
    if allocation == "FILE":
        (tmp_path / "shares.yaml").write_text('"layers.1.*": 2:4\n"q_proj": 80%\n')
        allocation = str(tmp_path / "shares.yaml")
    words = (
        "--allocation",
        allocation,
        "--sparsity",
        "60%",
        "--calibration",
        text_file,
        "--samples",
        6,
        "--sequence-length",
        32,
    )
    ran = command("prune", tiny[family], out, "--method", method, *words)
    assert ran.exit_code == 0, ran.stderr
    weights = load_file(out / "model.safetensors")
    layers = {layer["name"]: layer for block in report_of(out)["blocks"] for layer in block["layers"]}
    total = zeros = 0
    for name, layer in layers.items():
        weight = weights[f"{name}.weight"]
        own = parse_pattern(layer["pattern"])
        assert int((weight == 0).sum()) == layer["zeros"] == own.count_removed(weight.shape)
        if "FILE" in allocation or allocation.endswith("yaml"):
            named = "2:4" if "layers.1." in name else "80%" if name.endswith("q_proj") else None
            assert named is None or layer["pattern"] == named
        total, zeros = total + weight.numel(), zeros + layer["zeros"]
    assert len({layer["pattern"] for layer in layers.values()}) > 2
    assert zeros == round(0.6 * total)
    assert command("inspect", out, "--expect", "60%").exit_code == 0
    more = command("inspect", out, "--expect", "60.1%")
    assert more.exit_code == 1
    assert "all layers together have fewer zeros than 60.1%" in " ".join(more.stderr.split())
    name = list(layers)[-1]
    weight = weights[f"{name}.weight"]
    weight.view(-1)[weight.view(-1).eq(0).nonzero()[0]] = 1.0
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    broken = command("inspect", out, "--expect", "60%", "--json")
    assert broken.exit_code == 1
    assert [layer["name"] for layer in json.loads(broken.stdout)["layers"] if layer["holds"] is False] == [name]


def test_what_prune_takes_inspect_takes(tiny: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A file that names every layer: refused where it comes to another sparsity, found where it comes to it."""
    words = ("--allocation", tmp_path / "shares.yaml", "--method", "magnitude", "--sparsity", "60%")
    (tmp_path / "shares.yaml").write_text('"*": 59%')
    assert command("prune", tiny["opt"], tmp_path / "out", *words).exit_code == 1
    (tmp_path / "shares.yaml").write_text('"*": 60%')
    assert command("prune", tiny["opt"], tmp_path / "out", *words).exit_code == 0
    assert command("inspect", tmp_path / "out", "--expect", "60%").exit_code == 0
