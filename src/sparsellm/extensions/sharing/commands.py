"""`push`, and `--report-to` of the commands that run recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sparsellm.cli import options
from sparsellm.cli.console import print_json, print_line, report_errors, stderr, stdout
from sparsellm.cli.run_options import RunOptions
from sparsellm.errors import plural

if TYPE_CHECKING:
    from sparsellm.observers.events import Observer

Repo = Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub, as owner/name; may be new.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository private.")]
Branch = Annotated[str | None, typer.Option("--revision", help="Branch to push to; may be new.", show_default="main")]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace the files in REPO.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run all checks and list the files, but push nothing; needs no login.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--report-to",
        metavar="NAME",
        help="Experiment tracker: wandb, tensorboard, trackio or mlflow.",
        rich_help_panel="Output",
    ),
]


@dataclass(frozen=True)
class Tracking(RunOptions):
    """Experiment trackers that runs are logged to."""

    report_to: Track = None

    @contextmanager
    def observing(self, display: Observer) -> Iterator[Observer | None]:
        if not self.report_to:
            yield None
            return
        from sparsellm.extensions.sharing.tracking import Tracked

        with Tracked(*self.report_to, observer=display) as tracked:
            yield tracked


@options.recipe_options("trust_remote_code")
def push(
    context: typer.Context,
    output: options.Finished,
    repo: Repo,
    *,
    private: Private = False,
    revision: Branch = None,
    overwrite: Replace = False,
    dry_run: DryRun = False,
    as_json: options.JsonOption = False,
    trust_remote_code: bool = False,
) -> None:
    """Verify a pruned model and push it to the Hugging Face hub. Log in with `hf auth login` or HF_TOKEN.

    Example: sparsellm push opt-70 me/opt-70 --dry-run
    """
    with report_errors(context):
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        from sparsellm.extensions.sharing.hub import push as push_output
        from sparsellm.runtime.memory import human_bytes

        if not stderr.is_terminal:
            disable_progress_bars()
        print_line(stderr, f"verifying {output}" + ("" if dry_run else f", then pushing it to {repo}"))
        result = push_output(
            output,
            repo,
            private=private,
            revision=revision,
            overwrite=overwrite,
            dry_run=dry_run,
            trust_remote_code=trust_remote_code,
        )
        if as_json:
            print_json(asdict(result))
            return
        size = f"{plural(len(result.files), 'file')} ({human_bytes(result.bytes)})"
        if dry_run:
            print_line(stdout, f"Would push {size} to {result.url}: {', '.join(result.files)}.")
        else:
            print_line(stdout, f"Pushed {size} to {result.url}.")
