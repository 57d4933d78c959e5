"""The linear layers of an output by its files alone, where these tell the same as the class of its model.

To import a class of transformers takes longer than all else that is done for a small model. It tells which parameters there
are, which of them are linear layers, and whether config.json and the weights belong together. The run that wrote an output had
the class, so all three follow from its report and the table of families, as long as the files are as it wrote them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from sparsellm.checkpoints.documents import CONFIG
from sparsellm.checkpoints.files import SHARDS
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.opening import OpenedFiles, open_files, open_folder
from sparsellm.checkpoints.tensor_index import file_digest, report_digest
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.models.architectures import ARCHITECTURES
from sparsellm.pipeline.output_folder import REPORT
from sparsellm.pipeline.outputs import Output, read_output


def stored_layers(name: str) -> tuple[Path, dict[str, str]] | None:
    """Return the folder of an output, and its linear layers by the name of the tensor that each is.

    Args:
        name: The output as the user wrote it.

    Returns:
        None where only the class of the model surely tells: of a checkpoint that no run wrote, or that was changed since; of a
        family that is not in the table; and of layers that are transposed or parts of a tensor.

    Raises:
        SparseLLMError: As `open_checkpoint`, as far as the files tell what is wrong.
    """
    folder = open_folder(name)
    if not (folder / REPORT).is_file():
        return None
    opened = open_files(name, folder, packed=True)
    try:
        output = read_output(folder)
    except (BadCheckpoint, InvalidSetting):
        return None
    layers = _layers_in_table(opened)
    if not layers or not {layer.name for layer in output.report.layers} <= set(layers.values()):
        return None  # the head is a layer only where it is pruned, and then its class tells whether it may be
    return (folder, layers) if _is_as_written(opened, output) and _holds_the_parameters(opened, output) else None


def _layers_in_table(opened: OpenedFiles) -> dict[str, str]:
    """The layers of a family whose layers are tensors of their own; empty if a block lacks one, and for other families."""
    architecture = ARCHITECTURES.get(opened.fields["model_type"])
    if architecture is None or architecture.splits or architecture.experts or "auto_map" in opened.fields:
        return {}
    prefix = f"{architecture.blocks}."
    blocks = {key.removeprefix(prefix).partition(".")[0] for key in opened.headers if key.startswith(prefix)}
    names = [f"{prefix}{block}.{name}" for block in blocks for group in architecture.groups for name in group]
    layers = {f"{name}.weight": name for name in names}
    return layers if all(key in opened.headers and len(opened.headers[key].shape) == 2 for key in layers) else {}


def _is_as_written(opened: OpenedFiles, output: Output) -> bool:
    """Whether report, configuration and the names and shapes of tensors are those of the run, which read them with the class.

    A model in memory may be none that its configuration describes, and another transformers may name or refuse other things.
    """
    report, digests = output.report, output.digests
    read = [name for name in (CONFIG, *SHARDS) if name.endswith(".json") and (opened.folder / name).is_file()]
    headers = {key: header for file in opened.files for key, header in read_headers(file, decoded=False).items()}
    shapes = {key: {"dtype": header.dtype, "shape": list(header.shape)} for key, header in headers.items()}
    recorded = {key: {name: x.get(name) for name in ("dtype", "shape")} for key, x in digests.tensors.items()}
    return (
        report.environment.get("transformers") == version("transformers")
        and CONFIG in report.inputs.get(report.recipe.model, {})
        and report_digest(output.content) == digests.report
        and all(file_digest(opened.folder / name) == digests.files.get(name) for name in read)
        and shapes == recorded
    )


def _holds_the_parameters(opened: OpenedFiles, output: Output) -> bool:
    """Whether the files hold each parameter of the model once and nothing else: the run counted tied parameters once."""
    once = sum(len(read_headers(file)) for file in opened.files) == len(opened.headers)
    return once and sum(header.numel for header in opened.headers.values()) == output.report.totals.parameters
