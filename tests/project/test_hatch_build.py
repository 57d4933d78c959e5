"""The build: kernels where a C compiler is found, a package without them where it is not, and README for the package index."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from sparsellm.extensions.packed.formats.kernel_library import Library
from sparsellm.runtime import native
from tests.conftest import ROOT

ARM = "aarch64-linux-gnu-gcc"


@pytest.fixture
def build() -> ModuleType:
    specification = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "/nowhere/cc -x"])
def test_nothing_is_compiled_without_a_compiler(build: ModuleType, compiler: str, tmp_path: Path) -> None:
    """An earlier library, of other sources, does not stay."""
    (tmp_path / "_native.so").write_bytes(b"earlier")
    assert build.compile_kernels(tmp_path, {"CC": compiler}) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_compiler_without_the_instruction_sets_makes_portable_kernels(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "kernels.c").write_text("#ifndef SPARSELLM_PORTABLE\n#error\n#endif\nint portable;\n", encoding="ascii")
    library = tmp_path / "_native.so"
    assert build.compile_kernels(tmp_path, {}) == library
    assert b"portable" in library.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_all_sources_make_one_library(build: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.c").write_text(f"int symbol_{name};\n", encoding="ascii")
    library = build.compile_kernels(tmp_path, {})
    assert library == tmp_path / "_native.so"
    assert {b"symbol_one", b"symbol_two"} <= set(library.read_bytes().split(b"\0"))


def test_a_library_that_is_there_is_loaded() -> None:
    """Tests of the kernels are skipped without one: one that cannot be loaded must not look like that."""
    assert (native.load_library() is None) == (not native.LIBRARY.exists())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("flags", ["-DSPARSELLM_PORTABLE", "-DSPARSELLM_NARROW"])
def test_a_library_without_some_instruction_sets_is_loaded(build: ModuleType, flags: str, tmp_path: Path) -> None:
    """As on other processors than x86, and with compilers that do not know all of its sets."""
    sources = Path(shutil.copytree(native.LIBRARY.parent, tmp_path / "native", ignore=shutil.ignore_patterns("*.so")))
    library = build.compile_kernels(sources, {"CFLAGS": f"{flags} -O0"})
    with mock.patch.object(native, "LIBRARY", library):
        loaded = native.load_library.__wrapped__()
    assert loaded is not None
    assert Library(loaded).names[0] == "portable"


def test_no_library_of_a_compiler_is_asked_for_the_instruction_sets() -> None:
    """Zig's finds none. `processor.h` asks the processor."""
    files = [file.name for file in native.LIBRARY.parent.glob("*.[ch]") if "__builtin_cpu_supports(" in file.read_text()]
    assert not files


@pytest.mark.skipif(shutil.which(ARM) is None, reason=f"needs {ARM}")
def test_a_library_for_arm_has_every_function(tmp_path: Path) -> None:
    sources, functions = sorted(map(str, native.LIBRARY.parent.glob("*.c"))), mock.MagicMock()
    command = [ARM, "-O0", "-shared", "-fPIC", "-fvisibility=hidden", *sources, "-o", str(tmp_path / "arm.so")]
    subprocess.run(command, check=True, capture_output=True)
    listed = subprocess.run(["nm", "-D", str(tmp_path / "arm.so")], check=True, capture_output=True, text=True).stdout
    native._declare(functions)
    called = {name for name in vars(functions)["_mock_children"] if name.startswith("sparsellm_")}
    assert {"sparsellm_matmul", "sparsellm_bf16_pack"} <= called <= {line.split()[-1] for line in listed.splitlines()}


@pytest.mark.parametrize("compiled", [True, False])
def test_wheel_names_the_platform_only_with_a_library(build: ModuleType, compiled: bool, tmp_path: Path) -> None:
    library = tmp_path / "src" / "_native.so" if compiled else None
    hook = build.CustomBuildHook.__new__(build.CustomBuildHook)
    app = mock.Mock()
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    with (
        mock.patch.multiple(build.CustomBuildHook, root=str(tmp_path), app=app, create=True),
        mock.patch.object(build, "compile_kernels", return_value=library),
    ):
        hook.initialize("standard", data)
    assert app.display_warning.called is not compiled
    assert data["pure_python"] is not compiled
    assert data["artifacts"] == (["/src/_native.so"] if compiled else [])
    assert data.get("tag", "py3-none-").startswith("py3-none-")


def test_sources_are_in_the_source_distribution(build: ModuleType) -> None:
    """All files that the C files include are beside them; the hook is named, and nothing of the commit is left out."""
    included = [
        line.split('"')[1]
        for file in build.FOLDER.glob("*.[ch]")
        for line in file.read_text(encoding="ascii").splitlines()
        if line.startswith('#include "')
    ]
    assert set(included) == {file.name for file in build.FOLDER.glob("*.h")}
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert "custom" in configuration["wheel"]["hooks"]
    assert "sdist" not in configuration


@pytest.mark.parametrize(("version", "site", "files"), [("1.2.3", "1.2", "v1.2.3"), ("1.2.0.dev0", "dev", "main")])
def test_links_of_the_readme_are_absolute(build: ModuleType, version: str, site: str, files: str) -> None:
    """Pages and pictures are on the site of the version, other files in the repository at its tag; each is there."""
    hook, source = build.CustomMetadataHook.__new__(build.CustomMetadataHook), Path("src") / "sparsellm" / "__init__.py"
    urls = {"Repository": "https://host/me/it", "Documentation": "https://site"}
    metadata: dict[str, Any] = {"urls": urls}
    read = Path.read_text

    def other_version(path: Path, **keywords: Any) -> str:
        return f'__version__ = "{version}"\n' if path.parts[-3:] == source.parts else read(path, **keywords)

    with (
        mock.patch.object(build.CustomMetadataHook, "root", str(ROOT), create=True),
        mock.patch.object(Path, "read_text", other_version),
    ):
        hook.update(metadata)
    text = metadata["readme"]["text"]
    assert metadata["readme"]["content-type"] == "text/markdown"
    links = re.findall(r"\]\((.*?)\)", text)
    assert len(links) > 15
    for link in links:
        address, _, _ = link.partition("#")
        on_site, in_files = f"https://site/{site}/", f"https://host/me/it/blob/{files}/"
        assert address.startswith((on_site, in_files)), link
        if address.startswith(in_files):
            assert (ROOT / address.removeprefix(in_files)).exists(), link
            continue
        name = address.removeprefix(on_site)
        assert (ROOT / "docs" / f"{name.removesuffix('.html')}{'.md' if name.endswith('.html') else ''}").is_file(), link
    assert f"]({on_site}pictures/perplexity.svg)" in text
    assert f"]({on_site}popular-models.html#your-own-figures)" in text


def test_the_readme_is_made_for_the_index() -> None:
    """pyproject.toml leaves it to the hook, and has the addresses in one place."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "readme" in configuration["project"]["dynamic"]
    assert "custom" in configuration["tool"]["hatch"]["metadata"]["hooks"]
    assert set(configuration["project"]["urls"]) == {"Repository", "Documentation"}
    for text in ("README.md", "mkdocs.yml", "CITATION.cff"):
        assert "OWNER" not in (ROOT / text).read_text(encoding="utf-8"), text
