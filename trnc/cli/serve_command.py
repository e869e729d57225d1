"""`trnc serve`: what the API process knows of the model, and how it starts its engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.generation import generation_defaults
from trnc.checkpoint.source import resolve
from trnc.checkpoint.tokenizer import load_tokenizer
from trnc.cli.options import EngineArguments
from trnc.presets import load_preset
from trnc.serve.launch import ServeOptions, serve
from trnc.serve.model import ServedModel


def run_serve(arguments: EngineArguments, *, host: str, port: int, names: tuple[str, ...]) -> int:
    """Serve until stopped and return the exit status. Raises TrncError for what is wrong."""
    started = time.perf_counter() - time.process_time()
    console = Console()
    load_preset(arguments.preset)  # a wrong name fails here, before anything is downloaded
    source = resolve(arguments.model, report=console.print)
    tokenizer = load_tokenizer(source)
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    options = msgspec.json.encode(arguments).decode()

    def engine_argv(endpoint: str) -> Sequence[str]:
        return [sys.executable, "-m", "trnc.cli.engine_command", endpoint, options]

    return serve(
        engine_argv=engine_argv,
        model=ServedModel(
            names=names or (source.name,),
            tokenizer=tokenizer,
            template=template,
            defaults=generation_defaults(source),
        ),
        options=ServeOptions(host=host, port=port),
        console=console,
        started=started,
    )
