"""The words of the command line: every argument and option, with its help and the default that the recipe gives it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparsellm import __version__

_MODEL = "Folder of a checkpoint, hub name, demo:opt or demo:llama."


def _option(*names: str, panel: str | None = None, default: str | None = None, **words: Any) -> Any:
    """An option; `default` is what its help shows: the recipe's own default, where the command line's is "not given"."""
    shown: Any = True if default is None else default
    return typer.Option(*names, rich_help_panel=panel, show_default=shown, **words)


def _model(*names: str, **words: Any) -> Any:
    return _option(*names, panel="Model", **words)


def _pruning(*names: str, **words: Any) -> Any:
    return _option(*names, panel="Pruning", **words)


def _texts(*names: str, **words: Any) -> Any:
    return _option(*names, panel="Texts", **words)


def _machine(*names: str, **words: Any) -> Any:
    return _option(*names, panel="Machine", **words)


def _output(*names: str, **words: Any) -> Any:
    return _option(*names, panel="Output", **words)


def _version(asked: bool) -> None:
    """Before it is missed that no command was given."""
    if asked:
        print(__version__)
        raise typer.Exit


Debug = Annotated[bool, _option("--debug", help="Show the traceback of an error.")]
Version = Annotated[bool, _option("--version", help="Print the version and stop.", is_eager=True, callback=_version)]

Model = Annotated[str, typer.Argument(help=_MODEL)]
ModelOrConfig = Annotated[str | None, typer.Argument(help=_MODEL)]
Out = Annotated[str | None, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]

Revision = Annotated[str | None, _model("--revision", help="Of a hub name: a branch, tag or commit.")]
TrustRemoteCode = Annotated[
    bool | None, _model("--trust-remote-code", help="Run the code that the checkpoint brings.", default="False")
]
Architecture = Annotated[
    str | None, _model("--architecture", help="YAML that describes the model's form.", default="the table, or what is found")
]

Method = Annotated[
    str | None, _pruning(help="sparsellm, thorough, alps, swift, sparsegpt, wanda or magnitude.", default="sparsellm")
]
Sparsity = Annotated[str | None, _pruning(help="Share removed (70%, 0.7), or N:M (N of every M removed).", default="50%")]
AsPublished = Annotated[
    bool | None,
    _pruning("--as-published/--no-as-published", help="SparseLLM's Algorithm 1: SparseGPT inside, last epoch."),
]
Solver = Annotated[str | None, _pruning(help="The solver inside SparseLLM.", default="thorough; sparsegpt as published")]
Targets = Annotated[
    str | None, _pruning(help="What layers aim at: teacher (the dense model's outputs) or own.", default="teacher")
]
Residual = Annotated[
    bool | None,
    _pruning("--residual/--no-residual", help="Layers that write to the stream also repair what it has lost.", default="True"),
]
Curvature = Annotated[
    str | None,
    _pruning(help="How outputs are weighed by what they cost: none, diagonal, kronecker.", default="kronecker"),
]
Horizon = Annotated[
    str | None, _pruning(help="How far errors are followed to weigh them: feedforward, model.", default="model")
]
Newton = Annotated[int | None, _pruning(help="Gauss-Newton rounds over a feed-forward part, at most.", default="3")]
Epochs = Annotated[int | None, _pruning(help="SparseLLM's K.", default="1; 4 as published")]
Alpha = Annotated[float | None, _pruning(help="SparseLLM: weight of fitting the layers.", default="0.1")]
Beta = Annotated[float | None, _pruning(help="SparseLLM: weight of fitting the activation.", default="0.1")]
Couple = Annotated[
    str | None,
    _pruning(
        help="Whose layers form one problem: none or feedforward; as published, also blocks as in --blocks.",
        default="feedforward",
    ),
]
Allocation = Annotated[
    str | None,
    _pruning(
        help="How the sparsity is shared: uniform, owl, dlp, fisher, error, or a YAML file.", default="fisher for sparsellm"
    ),
]
AllocationBounds = Annotated[
    str | None,
    _pruning(help="The least and the largest sparsity that a layer may get by owl, dlp, fisher or error, as 60%:95%."),
]
Blocks = Annotated[str | None, _pruning(help="all, first-half, 0:12 or 3,5.", default="all")]
Only = Annotated[list[str] | None, _pruning(help="Prune only layers of this name; * is any text.")]
Skip = Annotated[list[str] | None, _pruning(help="Leave out layers of this name.")]
KeepZeros = Annotated[bool | None, _pruning("--keep-zeros", help="Weights that are zero already stay zero.", default="False")]
TrueSequential = Annotated[
    bool | None,
    _pruning(
        "--true-sequential/--no-true-sequential",
        help="alps, swift, sparsegpt, wanda: prune layers on what the pruned ones before them in the block write.",
        default="False",
    ),
]

Pruned = Annotated[str, typer.Argument(metavar="PRUNED", help="A pruned model's folder, as `prune` wrote it.")]
Recovered = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
Toward = Annotated[
    str, _model("--against", metavar="DENSE", help="The dense model that PRUNED was made from: folder, hub name or demo:opt.")
]
Scope = Annotated[str | None, _pruning(help="What is trained as one: block or model.", default="model")]
Steps = Annotated[
    int | None, _pruning(help="Gradient steps, at most.", default="100 over each block, 300 over the whole model")
]
RecoveryWritten = Annotated[
    int | None,
    _texts(
        "--written",
        help="Windows besides, that the dense model writes itself.",
        default="0 by block; for the model as many as let it read each about twice",
    ),
]

Calibration = Annotated[str | None, _texts(help=".txt, .raw, .json, .jsonl or .parquet; or c4, wikitext2, ptb, demo.")]
Text = Annotated[list[str] | None, _texts(help="A text: a file, or c4, wikitext2, ptb, demo. May be repeated.")]
TextField = Annotated[str | None, _texts(help="Field that holds the text.", default="text")]
Samples = Annotated[int | None, _texts(help="Calibration windows.", default="128")]
Written = Annotated[int | None, _texts(help="Calibration windows more, that the dense model writes itself.", default="0")]
Length = Annotated[int | None, _texts(help="Tokens a window.", default="2048, or the model's length if less")]
Seed = Annotated[int | None, _texts(help="Of the windows' places.", default="0")]
Evaluate = Annotated[list[str] | None, _texts(help="Measure the perplexity on this text, before and after.")]
EvaluateLimit = Annotated[int | None, _texts(help="Windows of each text, for a try.", default="all, 256 of C4")]
Prompt = Annotated[list[str] | None, _texts(help="Let the model continue this, before and after, for the report.")]
Task = Annotated[
    list[str] | None,
    _texts(help="Zero-shot task: boolq, rte, hellaswag, winogrande, arc_easy, arc_challenge, openbookqa, piqa; repeatable."),
]
TaskData = Annotated[str | None, _texts(metavar="DIR", help="The tasks' questions, as .jsonl files.", default="from the hub")]
TaskLimit = Annotated[int | None, _texts(help="Questions of each task, for a try.", default="all")]

Memory = Annotated[str | None, _machine(help="What the run may take, as 16GiB.", default="four fifths of what is free")]
Stream = Annotated[
    bool | None,
    _machine("--stream/--no-stream", help="Read the model block by block.", default="where it takes more than half of that"),
]
Device = Annotated[str | None, _machine(help="auto, cpu, cuda, mps.", default="auto")]
Dtype = Annotated[str | None, _machine(help="auto (as stored), float32, bfloat16, float16.", default="auto")]
Batch = Annotated[int | None, _machine(help="Windows at a time.", default="about 2,048 tokens")]

Config = Annotated[str | None, _output(help="YAML with the same fields; options win over it.")]
PrintConfig = Annotated[bool, _output("--print-config", help="Print the recipe as YAML and stop.")]
Resume = Annotated[bool, _output("--resume", help="Go on with an unfinished output, or start where there is none.")]
Restart = Annotated[bool, _output("--restart", help="Throw an unfinished output away and start.")]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace OUT if sparsellm wrote all that is in it.")]
Track = Annotated[
    list[str] | None, _output("--track", help="Also show the run in wandb, tensorboard or trackio; may be repeated.")
]
Json = Annotated[bool, _output("--json", help="Print the result as JSON on stdout.")]

Against = Annotated[str | None, typer.Option(metavar="DENSE", help="Tell which tensors differ from this model's.")]
Dense = Annotated[
    str | None,
    typer.Option("--against", metavar="DENSE", help="Hold what was not pruned against this model's, bit by bit."),
]
Expect = Annotated[
    str | None,
    typer.Option(help="Fail (exit 1) unless the pruned layers have at least this sparsity: each, or its own share of it."),
]

DemoOutput = Annotated[str | None, typer.Option(help="Folder to write SparseLLM's pruned model to; must not exist.")]
Family = Annotated[str, typer.Option(help="opt or llama.")]

SweepFile = Annotated[str, typer.Argument(metavar="SWEEP", help="YAML file with `recipe:` and `axes:`; see docs/sweeps.md.")]
SweepOut = Annotated[
    str | None,
    typer.Argument(
        metavar="OUT", help="Folder of the sweep; one that is there goes on. Default: the file's name without .yaml."
    ),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Run the file's small form: small models, a few windows.")]
OnlyCells = Annotated[list[str] | None, typer.Option("--only", metavar="AXIS=LABEL", help="Run only these cells.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a field of all cells; AXIS.LABEL=VALUE: what a label stands for."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Try failed cells again.")]
ListCells = Annotated[bool, typer.Option("--list", help="List the cells and what has become of each; run nothing.")]

Finished = Annotated[str, typer.Argument(metavar="OUT", help="A pruned model's folder, as `prune` wrote it.")]
Repo = Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub; made if it is not there.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository private.")]
Branch = Annotated[
    str | None, typer.Option("--revision", help="Branch to push to; made if it is not there.", show_default="main")
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace the files that REPO holds.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, tell what would be pushed, and push nothing. Needs no login.")]

Reported = Annotated[str, typer.Argument(metavar="RUN", help="A pruned model's folder, or a sweep's.")]
Page = Annotated[str | None, typer.Option("--output", help="The HTML file to write.", show_default="RUN.html, beside RUN")]
Figures = Annotated[str | None, typer.Option(metavar="DIR", help="Write every plot there too, as SVG and PNG.")]
