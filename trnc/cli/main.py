"""The commands of `trnc`. Each one checks its options and hands over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trnc import __version__
from trnc.checkpoint.source import DEFAULT_MODEL
from trnc.checkpoint.source import pull as pull_model
from trnc.cli import options
from trnc.cli.arguments import (
    CompileBackend,
    EngineArguments,
    FeatureArguments,
    Loop,
    check_mtp,
)
from trnc.cli.cache_command import cache_app
from trnc.cli.console import print_error, tell
from trnc.errors import ConfigError, TrncError
from trnc.presets import load_preset, preset_names, with_features

app = typer.Typer(
    name="trnc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Compile a language model into static graphs, then serve it from them.\n\n"
    "`trnc serve` alone downloads a small default model, compiles it once, and answers OpenAI "
    "clients on http://127.0.0.1:8000/v1. `trnc compile` does the compiling ahead of time, "
    "`trnc generate` answers one prompt in the terminal.",
)
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Run the command line; what a person can mend is one line, not a stack trace."""
    try:
        app()
    except TrncError as error:
        print_error(str(error))
        sys.exit(1)


@app.command()
@options.with_feature_options
def serve(
    features: FeatureArguments,
    model: options.Model = DEFAULT_MODEL,
    preset: options.PresetName = "default",
    mtp: options.MtpFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; may be given several times."),
    ] = None,
    backend: options.BackendName = "inductor",
    store: options.StoreFolder = None,
    jobs: options.Jobs = None,
    require_cache: options.RequireCache = False,
    threads: options.Threads = None,
    loop: Annotated[
        Loop,
        typer.Option(help="'overlapped' plans a step while the last one runs; 'plain' does not."),
    ] = "overlapped",
    max_waiting: Annotated[
        int | None,
        typer.Option(min=1, help="Refuse requests when so many wait. Default: no limit."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Refuse larger request bodies.")] = 16
    * 2**20,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Refuse requests when so many are open. Default: no limit."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TRNC_API_KEY",
            show_envvar=True,
            help="Serve only clients that send this key; may be given several times. Other "
            "users of the machine can see flags: the variable (keys separated by spaces) is safer.",
        ),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TRNC_ADMIN_API_KEY",
            show_envvar=True,
            help="The key for routes that change the server or show how it is set up.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Let web pages of this origin, such as https://example.org, call the server; "
            "may be given several times, '*' is every page. Default: none."
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate chain (PEM).")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="The certificate's key (PEM), if it is not in the same file."),
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(help="Serve only clients with a certificate that these authorities signed."),
    ] = None,
    priority_scheduling: Annotated[
        bool,
        typer.Option(help="Let requests with a better 'priority' be admitted before others."),
    ] = False,
    response_store: Annotated[
        int,
        typer.Option(
            min=0, help="Keep so many answers of /v1/responses for 'previous_response_id'."
        ),
    ] = 0,
    response_store_seconds: Annotated[
        int, typer.Option(min=1, help="Forget stored answers after so long.")
    ] = 3600,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="On SIGTERM or Ctrl-C, go on taking requests so long after /health says 503, "
            "for load balancers to notice.",
        ),
    ] = 0.0,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="How the model marks its reasoning: 'auto' looks at its chat template; 'none', "
            "'qwen3', 'glm45' or 'deepseek_r1'."
        ),
    ] = "auto",
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="How the model calls tools: 'auto' looks at its chat template; 'none', 'hermes', "
            "'llama3_json', 'glm45' or 'glm47'."
        ),
    ] = "auto",
    grace_seconds: Annotated[
        int, typer.Option(min=0, help="Then open requests get so long to finish.")
    ] = 30,
    trace: Annotated[
        str | None, typer.Option(help="Write every arrival and plan to this file, for replay.")
    ] = None,
) -> None:
    """Serve a model over HTTP to OpenAI clients; compile first whatever is not in the store."""
    from trnc.cli.serve_command import ParserNames, run_serve
    from trnc.serve.listening import ServeOptions

    options.set_threads(threads)
    arguments = EngineArguments(
        model=model,
        preset=preset,
        features=features,
        backend=backend,
        store=str(options.store_root(store)),
        jobs=options.job_count(jobs),
        require_cache=require_cache,
        loop=loop,
        max_waiting=max_waiting,
        trace=trace,
        mtp=mtp,
    )
    listening = ServeOptions(
        host=host,
        port=port,
        max_body_bytes=max_body_bytes,
        max_concurrent_requests=max_concurrent_requests,
        api_keys=tuple(api_key or ()),
        admin_api_key=admin_api_key,
        allowed_origins=tuple(allowed_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
        priority_scheduling=priority_scheduling,
        response_store=response_store,
        response_store_seconds=response_store_seconds,
        drain_seconds=drain_seconds,
        grace_seconds=grace_seconds,
    )
    names = tuple(served_model_name or ())
    parsers = ParserNames(reasoning=reasoning_parser, tool_call=tool_call_parser)
    raise typer.Exit(run_serve(arguments, listening, names=names, parsers=parsers))


@app.command("compile")
@options.with_feature_options
def compile_(
    features: FeatureArguments,
    model: options.Model = DEFAULT_MODEL,
    preset: options.PresetName = "default",
    mtp: options.MtpFile = None,
    backend: Annotated[
        CompileBackend,
        typer.Option(
            help="'inductor': for this processor. 'trainium': StableHLO for AWS Trainium, checked "
            "against its rules, and compiled where `neuronx-cc` is installed (docs/TRAINIUM.md)."
        ),
    ] = "inductor",
    store: options.StoreFolder = None,
    jobs: options.Jobs = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Compile for another instruction set than this machine's. What cannot be finished"
            " here is recorded in the store, and finished by a machine that has it."
            " With --backend trainium: trn2 (the default) or trn1."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what there is and what is missing.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="With --backend trainium: write modules and commands for a machine with "
            "`neuronx-cc` into this folder. Without the compiler that is done in any case."
        ),
    ] = None,
    finish: Annotated[
        Path | None,
        typer.Option(
            help="Compile the modules of such a folder with `neuronx-cc`; needs no model."
        ),
    ] = None,
) -> None:
    """Compile every variant of a preset into the store, so that serving never compiles.

    Prints the variant matrix first: every step, bucket, sampling mode and feature that serving can
    need, and which of the distinct artifacts behind them are in the store already.
    """
    from rich.console import Console

    if backend == "trainium" or finish is not None:
        from trnc.cli.trainium_command import TrainiumArguments, run_trainium

        trainium = TrainiumArguments(
            model=model,
            preset=preset,
            target=target,
            store=options.store_root(store),
            jobs=options.job_count(jobs),
            dry_run=dry_run,
            bundle=bundle,
            mtp=mtp,
            features=features,
        )
        run_trainium(trainium, finish=finish, console=Console())
        return
    if bundle is not None:
        raise ConfigError(f"--bundle goes with --backend trainium, not with {backend}")
    arguments = EngineArguments(
        model=model,
        preset=preset,
        features=features,
        backend=backend,
        store=str(options.store_root(store)),
        jobs=options.job_count(jobs),
        require_cache=False,
        mtp=mtp,
    )
    from trnc.cli.compile_command import run_compile

    run_compile(arguments, target=target, dry_run=dry_run, console=Console())


@app.command()
@options.with_feature_options
def generate(
    features: FeatureArguments,
    prompt: Annotated[str, typer.Argument(help="What to answer or, with --raw, to continue.")],
    model: options.Model = DEFAULT_MODEL,
    preset: options.PresetName = "default",
    mtp: options.MtpFile = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 means all tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    backend: options.BackendName = "inductor",
    store: options.StoreFolder = None,
    jobs: options.Jobs = None,
    require_cache: options.RequireCache = False,
    threads: options.Threads = None,
) -> None:
    """Answer one prompt in the terminal, streamed, with tokens per second at the end."""
    from trnc.cli.generate_command import GenerateOptions, run_generate
    from trnc.core import SamplingParams

    options.set_threads(threads)
    arguments = EngineArguments(
        model=model,
        preset=preset,
        features=features,
        backend=backend,
        store=str(options.store_root(store)),
        jobs=options.job_count(jobs),
        require_cache=require_cache,
        mtp=mtp,
    )
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    run_generate(arguments, GenerateOptions(prompt, sampling, max_tokens, raw))


@app.command()
@options.with_feature_options
def bench(
    features: FeatureArguments,
    model: options.Model = DEFAULT_MODEL,
    preset: options.PresetName = "default",
    mtp: options.MtpFile = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded a sequence.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over so many.")] = 3,
    backend: options.BackendName = "inductor",
    store: options.StoreFolder = None,
    jobs: options.Jobs = None,
    require_cache: options.RequireCache = False,
    threads: options.Threads = None,
) -> None:
    """Measure prefill and decode of this machine, at every number of sequences of the preset."""
    from trnc.cli.bench_command import run_bench

    options.set_threads(threads)
    arguments = EngineArguments(
        model=model,
        preset=preset,
        features=features,
        backend=backend,
        store=str(options.store_root(store)),
        jobs=options.job_count(jobs),
        require_cache=require_cache,
        mtp=mtp,
    )
    run_bench(arguments, prompt_tokens=prompt_tokens, output_tokens=output_tokens, rounds=rounds)


@app.command()
def presets() -> None:
    """List the presets that ship with trnc."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("name", "sequences", "prefill buckets", "context", "description"):
        table.add_column(column)
    for preset in map(load_preset, preset_names()):
        table.add_row(
            preset.name,
            f"up to {preset.max_rows}",
            ", ".join(map(str, preset.prefill_tokens)),
            str(preset.max_context),
            preset.description,
        )
    Console().print(table)


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help=f"'{DEFAULT_MODEL}' or a hub id such as org/name.")
    ] = DEFAULT_MODEL,
) -> None:
    """Download a model into the user's cache and check it; later starts need no network."""
    source = pull_model(model, report=tell)
    tell(f"{source.name} is in {source.path}")


@app.command("explain-miss")
@options.with_feature_options
def explain_miss(
    features: FeatureArguments,
    model: options.Model = DEFAULT_MODEL,
    preset: options.PresetName = "default",
    mtp: options.MtpFile = None,
    store: options.StoreFolder = None,
) -> None:
    """Say why artifacts are missing: which factor differs from the nearest one in the store."""
    loaded = with_features(load_preset(preset), features.switched, features.penalty_buckets)
    check_mtp(mtp, loaded)
    from rich.console import Console

    from trnc.cli.compile_command import run_explain

    run_explain(model, loaded, options.store_root(store), Console(), mtp=mtp)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"trnc {__version__}")
