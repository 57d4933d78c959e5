"""`push` against a small server that stands in for the hub: huggingface_hub calls it, the tests look at what arrived."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from typer.testing import CliRunner, Result

from tests.conftest import report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
TOKEN = "hf_" + "a" * 34
TYPES = {"model.safetensors": "lfs", "tokenizer.json": "lfs"}


class Hub(ThreadingHTTPServer):
    """Repositories in memory: by name, whether they are private, and by branch their files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.writable, self.full = True, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, private: bool = False, **files: str) -> None:
        """A repository that is there already."""
        held = {".gitattributes": b"* text"} | {path: text.encode() for path, text in files.items()}
        self.repos[name] = {"private": private, "branches": {"main": held}}


class Handler(BaseHTTPRequestHandler):
    """As much of the hub's interface as a push needs."""

    server: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def answer(self, data: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = [unquote(part) for part in urlparse(self.path).path.split("/")[1:]]
        repo = self.server.repos.get("/".join(path[2:4]))
        if repo is None:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif path[4:5] == ["tree"]:
            files = repo["branches"].get(path[5])
            if files is None:
                self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            else:
                self.answer([{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()])
        else:
            self.answer({"id": "/".join(path[2:4]), "private": repo["private"], "siblings": [], "tags": []})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2]
        if self.server.full:
            return self.answer({"error": "no room"}, 413)
        assert hashlib.sha256(data).hexdigest() == name
        self.server.objects[name] = data
        return self.answer({})

    def do_POST(self) -> None:  # noqa: PLR0911  (a branch for each thing that is asked)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = [unquote(part) for part in urlparse(self.path).path.split("/")[1:]]
        if self.path.startswith("/api/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or not self.server.writable:
            return self.answer({"error": "You do not have the required permissions"}, 403)
        if path == ["api", "repos", "create"]:
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}"
            self.server.add(name, told.get("private") or told.get("visibility") == "private")
            return self.answer({"url": f"{self.server.url}/{name}", "name": name, "id": "1"})
        if "objects" in path:
            named = [x | self.upload(x["oid"]) for x in json.loads(body)["objects"]]
            return self.answer({"transfer": "basic", "objects": named})
        repo, what, branch = self.server.repos["/".join(path[2:4])], path[4], path[5]
        if what == "branch":
            repo["branches"].setdefault(branch, dict(repo["branches"]["main"]))
            return self.answer({})
        if what == "preupload":
            files = [{"path": x["path"], "uploadMode": TYPES.get(x["path"], "regular")} for x in json.loads(body)["files"]]
            return self.answer({"files": [x | {"shouldIgnore": False} for x in files]})
        assert what == "commit"
        self.commit(repo["branches"][branch], [json.loads(line) for line in body.splitlines()])
        return self.answer(
            {"commitUrl": f"{self.server.url}/{path[2]}/{path[3]}/commit/0123", "commitOid": "0123", "success": True}
        )

    def upload(self, name: str) -> dict[str, Any]:
        if name in self.server.objects:
            return {}
        return {"actions": {"upload": {"href": f"{self.server.url}/objects/{name}"}}}

    def commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, and huggingface_hub told of it, with a login."""
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def finished(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned model; not to be written to."""
    from sparsellm.cli.app import app

    out = tmp_path_factory.mktemp("pruned") / "out"
    done = CliRunner().invoke(app, ["prune", str(tiny["llama"]), str(out), "--method", "magnitude", "--sparsity", "2:4"])
    assert done.exit_code == 0, done.stderr
    return out


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def contents(folder: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_every_file_is_uploaded(own: Path, hub: Hub, command: Command) -> None:
    """Every file that the report lists, byte for byte, in a new repository, and no other."""
    (own / "diary.txt").write_text("mine")
    (own / "notes").mkdir()
    (own / "notes" / "README.md").write_text("mine")
    (own / "README.md").write_text((own / "README.md").read_text() + "\nMy own words.\n")
    ran = command("push", own, "me/model-24", "--private")
    assert ran.exit_code == 0, ran.stderr
    assert f"{hub.url}/me/model-24" in ran.stdout
    repo = hub.repos["me/model-24"]
    assert repo["private"] is True
    arrived = repo["branches"]["main"]
    assert arrived.pop(".gitattributes")
    assert arrived == contents(own, report_of(own)["files"])


def test_a_repository_that_is_there(own: Path, hub: Hub, command: Command) -> None:
    """An empty one is filled; one with files is refused, and with --overwrite holds what was pushed alone."""
    hub.add("me/empty")
    assert command("push", own, "me/empty").exit_code == 0
    files = {"README.md": "old", "model-00002-of-00002.safetensors": "old"}
    hub.add("me/full", **files)
    refused(command("push", own, "me/full"), "me/full (main) exists and holds 2 files", "--overwrite")
    assert hub.repos["me/full"]["branches"]["main"]["README.md"] == b"old"
    ran = command("push", own, "me/full", "--overwrite", "--json")
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    names = report_of(own)["files"]
    assert told == {
        "url": f"{hub.url}/me/full",
        "repo": "me/full",
        "revision": "main",
        "files": names,
        "bytes": sum((own / name).stat().st_size for name in names),
        "commit": "0123",
    }
    assert hub.repos["me/full"]["branches"]["main"].keys() == {".gitattributes", *names}
    refused(command("push", own, "me/full", "--overwrite", "--private"), "me/full exists and is public", "--private")


def test_a_branch(own: Path, hub: Hub, command: Command) -> None:
    """It is made; what main holds stays there and does not come along; pushed to again it is refused."""
    hub.add("me/model", **{"old.bin": "old"})
    ran = command("push", own, "me/model", "--revision", "pruned")
    assert ran.exit_code == 0, ran.stderr
    assert f"{hub.url}/me/model/tree/pruned" in ran.stdout
    branches = hub.repos["me/model"]["branches"]
    assert branches["main"].keys() == {".gitattributes", "old.bin"}
    assert branches["pruned"].keys() == {".gitattributes", *report_of(own)["files"]}
    refused(command("push", own, "me/model", "--revision", "pruned"), "(pruned) exists")


def test_dry_run(own: Path, hub: Hub, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is checked and told, nothing is sent, and no login is asked for."""
    monkeypatch.delenv("HF_TOKEN")
    ran = command("push", own, "me/model", "--dry-run")
    assert ran.exit_code == 0, ran.stderr
    assert "Would push" in ran.stdout
    assert all(name in ran.stdout for name in report_of(own)["files"])
    assert hub.repos == {}
    (own / "tokenizer.json").unlink()
    refused(command("push", own, "me/model", "--dry-run"), "tokenizer.json")


def test_push_in_its_own_process_prints_only_json(own: Path, hub: Hub) -> None:
    """In a process of its own, by huggingface_hub's environment alone: nothing but JSON on stdout, no bars on stderr."""
    line = [sys.executable, "-m", "sparsellm", "push", str(own), "me/model", "--json"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["url"] == f"{hub.url}/me/model"
    assert done.stderr.splitlines() == [f"verifying {own}, then pushing it to me/model"]
    assert hub.repos["me/model"]["branches"]["main"].keys() > set(report_of(own)["files"])


@pytest.mark.parametrize(
    "name", ["model", "me/my/model", "me/", "/model", "me/mo del", "me/mo--del", "https://hub/me/model", ""]
)
def test_an_invalid_repository_name_is_refused(name: str, finished: Path, hub: Hub, command: Command) -> None:
    refused(command("push", finished, name), "is not a valid repository name", "owner/name")
    assert hub.repos == {}


def test_a_missing_login_is_explained(finished: Path, hub: Hub, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, and one that may not write there: what to do is said, in one message."""
    hub.writable = False
    refused(command("push", finished, "you/model"), "does not let this login write to you/model", "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    refused(command("push", finished, "me/model"), "`hf auth login`", "HF_TOKEN")


def test_no_network(finished: Path, hub: Hub, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, or huggingface_hub was told to stay offline: one message."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    refused(command("push", finished, "me/model"), "me/model failed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(command("push", finished, "me/model"), "me/model failed", "ffline")


def test_an_upload_that_fails_on_the_way(own: Path, hub: Hub, command: Command) -> None:
    """One message, and the same push with --overwrite goes on."""
    hub.full = True
    refused(command("push", own, "me/model"), "me/model failed", "413", "--overwrite")
    hub.full = False
    assert command("push", own, "me/model", "--overwrite").exit_code == 0
    assert hub.repos["me/model"]["branches"]["main"].keys() > set(report_of(own)["files"])


def test_only_a_finished_output_that_is_as_it_was_written_is_pushed(own: Path, hub: Hub, command: Command) -> None:
    (own / ".sparsellm").mkdir()
    refused(command("push", own, "me/model"), "is unfinished")
    (own / ".sparsellm").rmdir()
    (own / "tokenizer.json").write_text("{}")
    refused(command("push", own, "me/model"), "tokenizer.json was changed")
    assert hub.repos == {}
