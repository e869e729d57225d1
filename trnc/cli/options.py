"""Options that several commands share, so that they are spelled and explained once."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from trnc.checkpoint.source import DEFAULT_MODEL
from trnc.cli.arguments import Backend, FeatureArguments
from trnc.compiler.store import default_root
from trnc.errors import ConfigError
from trnc.presets import FEATURES

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=f"What to run: '{DEFAULT_MODEL}' (downloaded once), a .gguf file, a Hugging Face "
        "folder, or a hub id such as org/name.",
    ),
]
MtpFile = Annotated[
    str | None,
    typer.Option(
        "--mtp",
        metavar="FILE",
        help="The MTP block that a preset such as mtp-dynamic drafts with, for a model without an "
        f"MTP layer of its own. Default: the one that comes with trnc, for '{DEFAULT_MODEL}'.",
    ),
]
PresetName = Annotated[
    str,
    typer.Option(
        "--preset",
        "-p",
        help="The static configuration: a name from `trnc presets`, or the path of a .toml file.",
    ),
]
BackendName = Annotated[
    Backend,
    typer.Option(
        help="'inductor': compiled ahead of time, the fast one. 'eager': plain torch in fp32, "
        "nothing compiled; slow, the reference for correctness. 'neuron': AWS Trainium, through "
        "jax. 'xla-cpu': Trainium's modules on this processor; slow, to check their numbers.",
    ),
]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Folder of compiled artifacts. Default: $TRNC_STORE, else a folder in the user's "
        "cache (see `trnc cache path`).",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Compile in so many processes. Default: one a core."),
]
RequireCache = Annotated[
    bool,
    typer.Option(
        "--require-cache",
        help="Refuse to start if anything would have to be compiled.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Threads of the kernels. Default: the cores that this process may use."
    ),
]


def set_threads(threads: int | None) -> None:
    """Hand the thread count to the kernels of this process and of its children."""
    if threads is not None:
        os.environ["TRNC_THREADS"] = str(threads)


def store_root(folder: Path | None) -> Path:
    """Return the store's folder: the option, or the default. It need not exist yet.

    Raises ConfigError where it cannot be one.
    """
    root = folder or default_root()
    if root.exists() and not root.is_dir():
        raise ConfigError(f"the store {root} is no folder; give another --store or TRNC_STORE")
    return root


def job_count(jobs: int | None) -> int:
    """Return how many processes compile."""
    return jobs or len(os.sched_getaffinity(0))


PenaltyBuckets = Annotated[
    str | None,
    typer.Option(
        "--penalty-buckets",
        metavar="N,...",
        help="How many distinct tokens of a sequence are penalised, ascending: a size for each "
        "compiled variant. One for a full context is always added.",
        rich_help_panel="Features",
    ),
]


def _feature_option(name: str) -> Any:
    flag = name.replace("_", "-")
    return Annotated[
        bool | None,
        typer.Option(
            f"--{flag}/--no-{flag}",
            help=f"Compile variants for {FEATURES[name]}. Default: as the preset says.",
            rich_help_panel="Features",
            show_default=False,
        ),
    ]


def with_feature_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each feature, gathered in its parameter `features`."""

    def gathered(**given: Any) -> None:
        switched = {name: given.pop(name) for name in FEATURES}
        features = FeatureArguments(
            switched={name: on for name, on in switched.items() if on is not None},
            penalty_buckets=_bucket_list(given.pop("penalty_buckets")),
        )
        command(**given, features=features)

    own = signature(command, eval_str=True).parameters
    added = {name: _feature_option(name) for name in FEATURES}
    added["penalty_buckets"] = PenaltyBuckets
    kinds = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in added.items()
    ]
    kept = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
        if name != "features"
    ]
    shown = signature(command).replace(parameters=[*kept, *kinds], return_annotation=None)
    gathered.__signature__ = shown  # type: ignore[attr-defined]
    gathered.__annotations__ = {p.name: p.annotation for p in (*kept, *kinds)}
    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    return gathered


def _bucket_list(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            f"--penalty-buckets {text}: give whole numbers with commas, such as 64,512"
        ) from None
