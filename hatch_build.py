"""Compile the kernels for sparse weights, where there is a C compiler, when pip builds the package or as a script.

Also gives the package index a README whose links work there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # run as a script, or by the tests: hatchling is only where packages are built
    BuildHookInterface = MetadataHookInterface = object

FOLDER = Path(__file__).parent / "src" / "sparsellm" / "native"
"""The folder of the C files, all of which make one library there."""

FLAGS = ("-O2", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
VARIANTS = ((), ("-DSPARSELLM_PORTABLE",))
"""The second is for compilers that do not know the instruction sets."""


def compile_kernels(folder: Path = FOLDER, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Compile the C files of a folder to a library beside them.

    A library of an earlier build is removed first, so that it never serves other sources.

    Args:
        folder: The folder of the sources.
        environment: CC names another compiler than cc, gcc or clang; ARCHFLAGS and CFLAGS are added.

    Returns:
        The library; None without a compiler, if the compiler fails, or on Windows.
    """
    library = folder / "_native.so"
    library.unlink(missing_ok=True)
    candidates = [environment["CC"]] if environment.get("CC") else ["cc", "gcc", "clang"]
    compiler = next((words for name in candidates if shutil.which((words := shlex.split(name))[0])), None)
    if compiler is None or os.name != "posix":
        return None
    flags = [*FLAGS, *shlex.split(environment.get("ARCHFLAGS", "")), *shlex.split(environment.get("CFLAGS", ""))]
    partial = library.with_suffix(f".{os.getpid()}")
    for variant in VARIANTS:
        command = [*compiler, *flags, *variant, "-o", str(partial), *map(str, sorted(folder.glob("*.c")))]
        try:
            subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL, capture_output=True)
            return partial.replace(library)
        except (OSError, subprocess.SubprocessError):
            partial.unlink(missing_ok=True)
    return None


def absolute_links(text: str, urls: Mapping[str, str], version: str) -> str:
    """Turn relative links of README.md to pages and pictures of docs/ into ones to the site, others to the repository.

    Args:
        text: Markdown.
        urls: `Repository` and `Documentation`, as in pyproject.toml.
        version: The package's version; one with `.dev` has the site and the files of the branch main.
    """
    released = ".dev" not in version
    site = f"{urls['Documentation']}/{'.'.join(version.split('.')[:2]) if released else 'dev'}"
    files = f"{urls['Repository']}/blob/{f'v{version}' if released else 'main'}"

    def absolute(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        page = re.fullmatch(r"docs/(.*)\.md", path)
        picture = path.removeprefix("docs/") if path.startswith("docs/pictures/") else ""
        place = f"{site}/{page[1]}.html" if page else f"{site}/{picture}" if picture else f"{files}/{path}"
        return f"]({place}{anchor})"

    return re.sub(r"\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)", absolute, text)


class CustomMetadataHook(MetadataHookInterface):  # type: ignore[misc, valid-type]
    """Put README.md into the package's metadata, with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`, which pyproject.toml calls dynamic."""
        root = Path(self.root)
        source = (root / "src" / "sparsellm" / "__init__.py").read_text(encoding="utf-8")
        version = re.findall(r'^__version__ = "(.*?)"', source, re.MULTILINE)[0]
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, metadata["urls"], version)}


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Put the compiled library into the wheel, whose tag then names the platform; without it the wheel is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before a wheel, ordinary or editable, is put together."""
        try:
            library = compile_kernels()
        except OSError:  # such as a folder without permission to write
            library = None
        if library is None:
            self.app.display_warning("no kernels for sparse weights: a C compiler (gcc or clang) was not found, or failed")
            return
        build_data["artifacts"].append(f"/{library.relative_to(self.root).as_posix()}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # the library knows nothing of Python


if __name__ == "__main__":
    result = compile_kernels()
    print(result or "no C compiler (cc, gcc or clang), or it failed", file=sys.stderr)
    sys.exit(result is None)
