"""`push`: the command that puts a finished output on the hub."""

from __future__ import annotations

import typer

from sparsellm.cli import options
from sparsellm.cli.console import print_json, report_errors, stderr, stdout


@options.recipe_options("trust_remote_code", "architecture")
def push(
    context: typer.Context,
    output: options.Finished,
    repo: options.Repo,
    *,
    private: options.Private = False,
    revision: options.Branch = None,
    overwrite: options.Replace = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    trust_remote_code: bool = False,
    architecture: str | None = None,
) -> None:
    """Verify a pruned model and push it to the Hugging Face hub. Log in with `hf auth login` or HF_TOKEN.

    Example: sparsellm push opt-70 me/opt-70 --dry-run
    """
    with report_errors(context):
        from dataclasses import asdict

        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        from sparsellm.runs.hub import push as put
        from sparsellm.runtime.memory import human_bytes

        if not stderr.is_terminal:
            disable_progress_bars()
        more = (private, revision, overwrite, dry_run, trust_remote_code, architecture)
        next_block = "" if dry_run else f", then pushing it to {repo}"
        stderr.print(f"verifying {output}{next_block}", highlight=False, soft_wrap=True)
        done = put(output, repo, *more)
        if as_json:
            print_json(asdict(done))
            return
        told_of = f"{len(done.files)} files, {human_bytes(done.bytes)}"
        text = f"Would push {told_of}, to {done.url}: {', '.join(done.files)}." if dry_run else f"Pushed {told_of}: {done.url}"
        stdout.print(text, highlight=False, soft_wrap=True)
