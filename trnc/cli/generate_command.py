"""`trnc generate`: one prompt, answered in the terminal by an engine in this process."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from rich.console import Console

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.source import resolve
from trnc.checkpoint.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from trnc.cli.arguments import EngineArguments
from trnc.cli.console import say
from trnc.cli.engine_command import start
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.engine.offline import run_requests


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What to answer, and how."""

    prompt: str
    sampling: SamplingParams
    max_tokens: int
    raw: bool


def run_generate(arguments: EngineArguments, options: GenerateOptions) -> None:
    """Stream the answer to stdout, and the speed to stderr."""
    console = Console(stderr=True)
    tokenizer = load_tokenizer(resolve(arguments.model, report=say(console)))
    executor, timings, _ = start(arguments, say(console, "dim"))
    request = Submit(
        request_id="generate",
        prompt_ids=tuple(_prompt_ids(tokenizer, options)),
        sampling=options.sampling,
        max_tokens=options.max_tokens,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    try:
        text = Detokenizer(tokenizer)
        times = [time.perf_counter()]
        for delta in run_requests(executor, [request]):
            sys.stdout.write(text.push(delta.token_ids))
            sys.stdout.flush()
            times.append(time.perf_counter())
        print(text.flush())
    finally:
        executor.close()
    _print_speed(console, len(request.prompt_ids), times, sum(timings.values()))


def _prompt_ids(tokenizer: Tokenizer, options: GenerateOptions) -> list[int]:
    if options.raw or tokenizer.chat_template is None:
        return tokenizer.encode(options.prompt, add_special_tokens=True)
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    chat = [{"role": "user", "content": options.prompt}]
    text = template.render(chat, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _print_speed(console: Console, prompt: int, times: list[float], start_seconds: float) -> None:
    first, decode = times[1] - times[0], times[-1] - times[1]
    line = (
        f"start {start_seconds:.2f} s, first token {first * 1000:.0f} ms ({prompt} prompt tokens)"
    )
    if decode > 0:
        line += f", then {(len(times) - 2) / decode:.1f} tok/s ({len(times) - 1} tokens)"
    say(console, "dim")(line)
