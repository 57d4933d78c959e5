"""The model card of a packed model, and the speeds that `bench` adds to card and report."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePath

from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.tensor_index import report_digest
from sparsellm.errors import InvalidSetting, VerificationFailed
from sparsellm.extensions.packed.record import PACKING, Bench, Packed
from sparsellm.outputs.folder import CARD
from sparsellm.outputs.verification import Output, read_finished
from sparsellm.texts.json_files import durable, strict_json

ZEROS_STAY = """The zeros are stored as ordinary numbers: the files keep their size, and the model runs as fast as the dense
one, unless the software that runs it makes use of zeros.
"""
"""Paragraph of a model card that does not hold for a packed model."""

LOADS, LOADS_PACKED = (
    "\nfrom transformers import ",
    "\nimport sparsellm\n\nsparsellm.register()\n\nfrom transformers import ",
)
"""First lines of the example that loads a model, and of the one that loads a packed model."""

BEGIN, REPLACED_MARKS, END = "<!-- packed -->", "<!-- packed, in place of another paragraph -->", "<!-- end of packed -->"
"""Marks around the paragraph of a packed model's card."""

_SPEED = re.compile(rf"(\nDecoding on [^\n]*, by `sparsellm bench`:\n\n(- .*\n)+)?{END}")
"""Where the paragraph's end is, after the speeds if there are some."""


def packed_card(text: str, result: Packed, *, pruned: bool) -> str:
    """Return a model card with a paragraph on the packed form, in place of the one that says how zeros are stored."""
    head, _, rest = text.partition(ZEROS_STAY)
    mark = REPLACED_MARKS if rest or text.endswith(ZEROS_STAY) else BEGIN
    rest = rest.replace(LOADS, LOADS_PACKED)
    if mark == BEGIN:
        matter = re.match(r"\s*---[ \t]*\n.*?\n---[ \t]*\n", text, re.DOTALL)
        head, rest = (text[: matter.end()], text[matter.end() :]) if matter else ("", text)
    matrices = f"{len(result.packed)} of {len(result.matrices)} matrices"
    lossless = "Nothing is lost: `sparsellm unpack` gives every tensor back bit by bit."
    if result.rounded:
        lossless = "The weights were rounded as they were packed: `sparsellm unpack` gives the rounded ones."
    made = "" if pruned else "sparsellm packed this model and did not prune it.\n"
    paragraph = (
        f"{made}The zeros are not stored: the weights take {result.size}.\n"
        f"{matrices} are packed, at {result.bits:.2f} bits a weight\n"
        f"({result.description}). {lossless} To load the model, call `sparsellm.register()` first.\n"
    )
    return f"{head}{mark}\n{paragraph}{END}\n{rest}"


def recordable(packed: str | Path) -> Output:
    """Read the report of a packed model, so that speeds can be added to it.

    Raises:
        InvalidSetting: `pack` did not write the folder.
        BadCheckpoint: The report is damaged, or files are missing.
        VerificationFailed: The report was changed since it was written.
    """
    output = read_finished(packed)
    if PACKING not in output.report.sections:
        raise InvalidSetting(f"`record=True` is for what pack wrote, and {packed} has no sizes in its {REPORT}. Leave it out.")
    if report_digest(output.content) != output.digests.report:
        raise VerificationFailed(f"{REPORT} of {packed} was changed since it was written. Pack the model again.")
    return output


def record_speed(packed: str | Path, bench: Bench) -> None:
    """Write speeds into the report and the card of a packed model, in place of earlier ones. Raises as `recordable`."""
    output = recordable(packed)
    speed = strict_json(bench.to_dict() | {"model": PurePath(bench.model).name})
    content = dict(output.content) | {"packing": output.content["packing"] | {"bench": json.loads(speed)}}
    content["digests"] = content["digests"] | {"report": report_digest(content)}
    card = output.folder / CARD
    if card.is_file():
        lines = "".join(f"- {sentence}\n" for sentence in bench.describe())
        text = f"\nDecoding on {bench.machine}, by `sparsellm bench`:\n\n{lines}{END}"
        durable(card, _SPEED.sub(lambda _: text, card.read_text(encoding="utf-8")).encode())
    durable(output.folder / REPORT, f"{strict_json(content)}\n".encode())


def dense_card(text: str) -> str:
    """Return the card of a packed model as it was before."""
    if REPLACED_MARKS in text:
        text = text.replace(LOADS_PACKED, LOADS)
    text = re.sub(f"{REPLACED_MARKS}\n.*?{END}\n", lambda _: ZEROS_STAY, text, flags=re.DOTALL)
    return re.sub(f"{BEGIN}\n.*?{END}\n", "", text, flags=re.DOTALL)
