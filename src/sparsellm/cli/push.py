"""`push`: the command that uploads a finished output to the hub."""

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

        from sparsellm.runs.hub import push as push_output
        from sparsellm.runtime.memory import human_bytes

        if not stderr.is_terminal:
            disable_progress_bars()
        pushing = "" if dry_run else f", then pushing it to {repo}"
        stderr.print(f"verifying {output}{pushing}", highlight=False, soft_wrap=True)
        result = push_output(
            output,
            repo,
            private=private,
            revision=revision,
            overwrite=overwrite,
            dry_run=dry_run,
            trusted=trust_remote_code,
            architecture=architecture,
        )
        if as_json:
            print_json(asdict(result))
            return
        size = f"{len(result.files)} files, {human_bytes(result.bytes)}"
        text = f"Would push {size}, to {result.url}: {', '.join(result.files)}." if dry_run else f"Pushed {size}: {result.url}"
        stdout.print(text, highlight=False, soft_wrap=True)
