"""Kill runs at random moments, resume them, and compare what they write with an unbroken run's: docs/large-models.md.

    python benchmarks/kills.py --kills 25
    python benchmarks/kills.py --kills 25 --methods sparsellm --stream

Each method prunes a bundled model again and again, every time with `--resume`; SIGKILL comes at a moment drawn evenly over the
time of an unbroken run. A run that gets to its end is compared, thrown away, and begun anew, until there were as many kills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

METHODS = ("magnitude", "wanda", "sparsegpt", "alps", "sparsellm")


def digests(folder: Path) -> dict[str, str]:
    """By file, a digest of its bytes; without the report and the log, which hold times."""
    files = sorted(file for file in folder.iterdir() if file.name not in ("sparsellm.json", "sparsellm-log.jsonl"))
    return {file.name: hashlib.blake2b(file.read_bytes()).hexdigest() for file in files}


def phase(out: Path) -> str:
    """How far a run had come, by its journal."""
    journal = out / ".sparsellm" / "journal.jsonl"
    if not journal.exists():
        return "finished" if out.exists() and not journal.parent.exists() else "before the first block"
    done = sum(line.startswith('{"block"') for line in journal.read_text(errors="replace").splitlines())
    return f"after {done} blocks"


def torture(method: str, kills: int, words: list[str], folder: Path) -> tuple[Counter[str], int, bool]:
    """Kill and resume; in which phases kills came, how many runs got to their end, and whether all wrote what they should."""
    base = [sys.executable, "-m", "sparsellm", "prune", "demo:opt"]
    rest = [
        "--method",
        method,
        "--sparsity",
        "60%",
        "--calibration",
        "demo",
        "--samples",
        "8",
        "--sequence-length",
        "128",
        *words,
    ]
    whole, out = folder / f"{method}-whole", folder / f"{method}-out"
    started = time.perf_counter()
    subprocess.run([*base, str(whole), *rest], check=True, capture_output=True)
    usual, wanted = time.perf_counter() - started, digests(whole)
    draw, came, ended, same = random.Random(0), Counter[str](), 0, True
    while came.total() < kills or out.exists():
        process = subprocess.Popen([*base, str(out), *rest, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(draw.uniform(0, usual) if came.total() < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            came[phase(out)] += 1
            continue
        ended += 1
        same = same and code == 0 and digests(out) == wanted and not (out / ".sparsellm").exists()
        shutil.rmtree(out)
        if came.total() >= kills:
            break
    return came, ended, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--stream", action="store_true")
    words = parser.parse_args()
    more = ["--offload"] if words.stream else []
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for method in words.methods:
            came, ended, same = torture(method, words.kills, more, Path(folder))
            print(json.dumps({"method": method, "kills": dict(came), "runs ended": ended, "same bytes": same}), flush=True)
            good = good and same
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
