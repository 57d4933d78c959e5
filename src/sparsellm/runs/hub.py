"""A finished output put on the hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsellm._version import __version__
from sparsellm.checkpoints.files import first_line
from sparsellm.errors import AccessDenied, InvalidSetting, OutputExists, Unreachable
from sparsellm.runs.finished import finished_report
from sparsellm.runs.verification import verify

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
"""The branch that a repository has from the first."""

OF_THE_HUB = {".gitattributes"}
"""What the hub itself puts into a new repository."""


@dataclass(frozen=True)
class Pushed:
    """What was pushed, or would be. url: where it is seen. commit: empty where nothing was pushed."""

    url: str
    repo: str
    revision: str
    files: tuple[str, ...]
    bytes: int
    commit: str = ""


def push(
    output: str | Path,
    repo: str,
    private: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    trusted: bool = False,
    architecture: str | Path | None = None,
) -> Pushed:
    """Put a finished output on the hub, by huggingface_hub and its login; where it is then.

    repo: owner/name; it is made if it is not there. private: make it so. revision: a branch, made if it is not there.
    overwrite: replace what a repository holds. dry_run: check all that can be checked here, and push nothing. trusted,
    architecture: as for `inspect`.
    Only files that the report lists are pushed, after `verify` has passed; its card may have been edited.
    Raises what `verification.verify` does; InvalidSetting for a name that is none, AccessDenied
    without a login that may write, OutputExists for a repository that holds files, Unreachable without a network.
    """
    from huggingface_hub import HfApi, get_token

    _check_name(repo)
    folder, report = finished_report(output)
    if not dry_run and get_token() is None:
        raise AccessDenied("The hub wants a login to write. Run `hf auth login` with a token that may write, or set HF_TOKEN.")
    verify(output, None, trusted, architecture)
    files = tuple(sorted(report["files"]))
    size = sum((folder / name).stat().st_size for name in files)
    api, branch = HfApi(library_name="sparsellm", library_version=__version__), revision or MAIN
    url = f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
    if dry_run:
        return Pushed(url, repo, branch, files, size)
    with _told(repo):
        _prepare(api, repo, branch, private, overwrite)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            commit_message=f"Pruned with sparsellm {__version__}",
            allow_patterns=[glob.escape(name) for name in files],
            delete_patterns="*",  # the shards of a model that stood there before
        )
    return Pushed(url, repo, branch, files, size, done.oid)


def _check_name(repo: str) -> None:
    """Raise InvalidSetting unless a name is owner/name as the hub has them."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("it has no owner")
    except HFValidationError as error:
        raise InvalidSetting(f"{repo!r} is no repository's name ({first_line(error)}). Write owner/name.") from None


def _prepare(api: HfApi, repo: str, branch: str, private: bool, overwrite: bool) -> None:
    """Make repository and branch where they are not there; raise OutputExists where they hold files."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        there = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private)
        files = set()
    else:
        if private and not there.private:
            raise InvalidSetting(f"{repo} exists and is public. Make it private in its settings, or leave out --private.")
        try:
            files = set(api.list_repo_files(repo, revision=branch)) - OF_THE_HUB
        except RevisionNotFoundError:
            files = set()
    if files and not overwrite:
        what = f"{repo} ({branch}) exists and holds {len(files)} files, {min(files)} first"
        raise OutputExists(f"{what}. Choose another name, or pass --overwrite to replace them.")
    if branch != MAIN:
        api.create_branch(repo, branch=branch, exist_ok=True)


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """Within the context the hub's errors are this package's."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        for one in _causes(error):
            if isinstance(one, HfHubHTTPError):
                if one.response.status_code in (401, 403):
                    why = f"The hub does not let this login write to {repo} ({first_line(one)})."
                    raise AccessDenied(f"{why} Run `hf auth login` with a token that may.") from error
                why = f"The hub did not take {repo} ({first_line(one)})."
                raise Unreachable(f"{why} Try again, with --overwrite if a part arrived.") from error
            # The hub's library has changed the one that it reaches the network by, and may again.
            if isinstance(one, ConnectionError) or any(kind.__module__.startswith("httpx") for kind in type(one).__mro__):
                why = f"The hub cannot be reached ({type(one).__name__}: {first_line(one)})."
                raise Unreachable(f"{why} Try again, with --overwrite if a part arrived.") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and so on: an upload's is behind one that only names the file."""
    while error is not None:
        yield error
        error = error.__cause__
