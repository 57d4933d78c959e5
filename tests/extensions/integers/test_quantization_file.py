import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.integers.scales_file import read_scales, write_scales
from sparsellm.outputs.folder import SCALES_FILE

NAME = "model.layers.0.mlp.up_proj.weight"


def test_scales_are_read_as_they_were_written(tmp_path: Path) -> None:
    scales = {
        NAME: Scales(torch.rand(4, 3).bfloat16(), IntegerFormat(4, 64)),
        "model.layers.0.mlp.down_proj.weight": Scales(torch.rand(5, 1).bfloat16(), IntegerFormat(8, 0)),
    }
    write_scales(tmp_path, scales)
    read = read_scales(tmp_path)
    assert read.keys() == scales.keys()
    for name, expected in scales.items():
        assert torch.equal(read[name].scales, expected.scales)
        assert read[name].format == expected.format


def test_a_folder_without_the_file_has_no_scales(tmp_path: Path) -> None:
    assert read_scales(tmp_path) == {}


ENTRY = {NAME: {"bits": 4, "group_size": 64}}


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ({f"{NAME}_scale": torch.ones(2, 1).bfloat16()}, {}, "Invalid JSON"),
        ({f"{NAME}_scale": torch.ones(2, 1).bfloat16()}, {"sparsellm": "[]"}, "an object"),
        ({f"{NAME}_scale": torch.ones(2, 1).bfloat16()}, {"sparsellm": '{"a": {"bits": "x"}}'}, "3, 4 or 8"),
        ({f"{NAME}_scale": torch.ones(2, 1).bfloat16()}, {"sparsellm": "{}"}, "its list"),
        ({f"{NAME}_scale": torch.ones(2, 1)}, {"sparsellm": json.dumps(ENTRY)}, "finite bfloat16"),
        ({f"{NAME}_scale": torch.ones(2).bfloat16()}, {"sparsellm": json.dumps(ENTRY)}, "two dimensions"),
        ({f"{NAME}_scale": torch.full((2, 1), torch.nan).bfloat16()}, {"sparsellm": json.dumps(ENTRY)}, "finite bfloat16"),
        (
            {f"{NAME}_scale": torch.ones(2, 1).bfloat16()},
            {"sparsellm": json.dumps({NAME: {"bits": 5, "group_size": 64}})},
            "3, 4 or 8",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], reason: str) -> None:
    save_file(tensors, tmp_path / SCALES_FILE, metadata)
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        read_scales(tmp_path)
    assert SCALES_FILE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cut_off_file(tmp_path: Path) -> None:
    write_scales(tmp_path, {NAME: Scales(torch.rand(4, 3).bfloat16(), IntegerFormat(4, 64))})
    file = tmp_path / SCALES_FILE
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(BadCheckpoint, match=SCALES_FILE):
        read_scales(tmp_path)
