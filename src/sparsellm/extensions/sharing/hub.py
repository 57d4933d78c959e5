"""Upload of a finished output to the Hugging Face hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsellm import __version__
from sparsellm.errors import AccessDenied, InvalidSetting, OutputExists, Unreachable, first_line, plural
from sparsellm.outputs.verification import read_finished, verify

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
"""Default branch of a repository."""

OF_THE_HUB = {".gitattributes"}
"""Files that the hub adds to a new repository."""


@dataclass(frozen=True)
class Pushed:
    """Result of a push or dry run.

    Attributes:
        url: Web address of the repository or branch.
        repo: owner/name.
        files: Names of the pushed files.
        commit: Commit hash; empty after a dry run.
    """

    url: str
    repo: str
    revision: str
    files: tuple[str, ...]
    bytes: int
    commit: str = ""


def push(
    output: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
) -> Pushed:
    """Verify a finished output and upload it to the hub, with the login of huggingface_hub.

    Only files that the report lists are uploaded. The model card may have been edited.

    Args:
        output: Folder that `prune` or `recover` wrote.
        repo: Repository as owner/name, created if it does not exist.
        private: Create a private repository.
        revision: Branch, created if it does not exist; None is the default branch.
        overwrite: Replace the files of an existing repository.
        dry_run: Run all local checks without uploading.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Returns:
        What was uploaded, or would be.

    Raises:
        InvalidSetting: `repo` is not a valid name, or `private` is set and the repository is public.
        AccessDenied: There is no login with write access.
        OutputExists: The repository holds files and `overwrite` is not set.
        Unreachable: The hub cannot be reached or rejects the upload.
        SparseLLMError: As raised by `verify`.
    """
    from huggingface_hub import HfApi, get_token

    _check_name(repo)
    finished = read_finished(output)
    if not dry_run and get_token() is None:
        raise AccessDenied("Pushing needs a login. Run `hf auth login` with a token that has write access, or set HF_TOKEN.")
    verify(output, trust_remote_code=trust_remote_code)
    files = tuple(sorted(finished.report.files))
    size = sum((finished.folder / name).stat().st_size for name in files)
    api, branch = HfApi(library_name="sparsellm", library_version=__version__), revision or MAIN
    url = f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
    if dry_run:
        return Pushed(url, repo, branch, files, size)
    with _translate_errors(repo):
        _prepare_repo(api, repo, branch, private=private, overwrite=overwrite)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=finished.folder,
            revision=branch,
            commit_message=f"Pruned with sparsellm {__version__}",
            allow_patterns=[glob.escape(name) for name in files],
            delete_patterns="*",  # shards of an earlier model
        )
    return Pushed(url, repo, branch, files, size, commit.oid)


def _check_name(repo: str) -> None:
    """Raise InvalidSetting unless a repository name has the form owner/name and is valid on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("it has no owner")
    except HFValidationError as error:
        raise InvalidSetting(f"{repo!r} is not a valid repository name ({first_line(error)}). Write owner/name.") from None


def _prepare_repo(api: HfApi, repo: str, branch: str, *, private: bool, overwrite: bool) -> None:
    """Create repository and branch if missing; raise OutputExists if they hold files that may not be replaced."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private)
        files = set()
    else:
        if private and not info.private:
            raise InvalidSetting(f"{repo} exists and is public. Make it private in its settings, or leave out `private`.")
        try:
            files = set(api.list_repo_files(repo, revision=branch)) - OF_THE_HUB
        except RevisionNotFoundError:
            files = set()
    if files and not overwrite:
        state = f"{repo} ({branch}) exists and holds {plural(len(files), 'file')}, {min(files)} first"
        raise OutputExists(f"{state}. Choose another name, or pass `overwrite=True` to replace them.")
    if branch != MAIN:
        api.create_branch(repo, branch=branch, exist_ok=True)


@contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    """Convert errors of the hub and the network to errors of this package."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
                reason = f"The hub does not let this login write to {repo} ({first_line(cause)})."
                raise AccessDenied(f"{reason} Run `hf auth login` with a token that has write access.") from error
            # huggingface_hub has used different HTTP libraries: requests raises ConnectionError, httpx its own classes.
            is_httpx = any(kind.__module__.startswith("httpx") for kind in type(cause).__mro__)
            if is_httpx or isinstance(cause, (HfHubHTTPError, ConnectionError)):
                reason = f"The upload to {repo} failed ({type(cause).__name__}: {first_line(cause)})."
                raise Unreachable(f"{reason} Try again, with `overwrite=True` if some files were uploaded.") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes: upload errors are wrapped in one that only names the file."""
    while error is not None:
        yield error
        error = error.__cause__
