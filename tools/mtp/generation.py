"""The model's own answers to the prompts, by our own engine: what the block learns to foretell.

Answers are appended to a file of JSON lines, one when it is complete. What a request gets depends
on nothing but itself, so a run that was interrupted goes on where it stopped, with the same text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp.prompts import Domain, Prompt, Split

if TYPE_CHECKING:
    from trnc.checkpoint.tokenizer import Tokenizer
    from trnc.core import Executor, SamplingParams
    from trnc.engine.messages import Submit

BATCH = 512  # requests that are submitted at once: the rows run empty only at the end of a batch


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the model's answer, as token ids. `temperature` 0 is greedy."""

    index: int
    split: Split
    domain: Domain
    temperature: float
    prompt_ids: list[int]
    output_ids: list[int]


def read_lines(path: Path) -> list[Answer]:
    """Return the complete answers of a file in its order; no file has none."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what has no newline was cut off
    return [Answer(**json.loads(line)) for line in lines]


def sampling(index: int, split: Split, seed: int) -> SamplingParams:
    """Return how an answer is picked: half of them greedily, and all that are held out."""
    from trnc.core import SamplingParams

    pick = random.Random(f"{index} {split} {seed}")
    if split == "held_out" or pick.random() < 0.5:
        return SamplingParams()
    return SamplingParams(
        temperature=round(pick.uniform(0.6, 1.0), 2),
        top_p=pick.choice((1.0, 0.95)),
        seed=pick.getrandbits(31),
    )


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the ids of a prompt: a chat of one message, or as it stands."""
    from trnc.checkpoint.chat_template import ChatTemplate

    if prompt.raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt.text, add_special_tokens=True)
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    text = template.render([{"role": "user", "content": prompt.text}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def generate(
    executor: Executor,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    indexes: range,
    path: Path,
    *,
    seed: int,
    max_tokens: int,
) -> Iterator[Answer]:
    """Append the answers to the prompts of `indexes` that the file lacks, and yield each."""
    from trnc.engine.messages import Submit

    done = {answer.index for answer in read_lines(path)}
    _drop_torn_line(path)
    missing = [index for index in indexes if index not in done and not prompts[index].mixed]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        for start in range(0, len(missing), BATCH):
            requests = [
                Submit(
                    request_id=str(index),
                    prompt_ids=tuple(encode(tokenizer, prompts[index])),
                    sampling=sampling(index, prompts[index].split, seed),
                    max_tokens=max_tokens,
                    stop_token_ids=tokenizer.eos_token_ids,
                )
                for index in missing[start : start + BATCH]
            ]
            for answer in _answers(executor, requests, prompts):
                out.write(json.dumps(asdict(answer)) + "\n")
                out.flush()
                yield answer


def _answers(
    executor: Executor, requests: Iterable[Submit], prompts: Sequence[Prompt]
) -> Iterator[Answer]:
    """Run requests together and yield each answer when it is complete."""
    from trnc.engine.offline import run_requests

    asked = {request.request_id: request for request in requests}
    tokens: dict[str, list[int]] = {name: [] for name in asked}
    for delta in run_requests(executor, list(asked.values())):
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            request, index = asked[delta.request_id], int(delta.request_id)
            yield Answer(
                index=index,
                split=prompts[index].split,
                domain=prompts[index].domain,
                temperature=request.sampling.temperature,
                prompt_ids=list(request.prompt_ids),
                output_ids=tokens.pop(delta.request_id),
            )


def _drop_torn_line(path: Path) -> None:
    """Cut off what an interrupted run left after the last newline."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def open_engine(model: str, preset: str) -> Any:
    """Return an executor of the compiled backend; what the store lacks is compiled."""
    from functools import partial

    from rich.console import Console

    from trnc.cli.compile_command import compile_missing
    from trnc.cli.options import job_count
    from trnc.compiler.store import default_root
    from trnc.presets import load_preset
    from trnc.runtime.packed_store import packed_root
    from trnc.runtime.start import StartOptions, start_executor

    console = Console(stderr=True)
    options = StartOptions(model, load_preset(preset), "inductor", default_root(), packed_root())
    compiler = partial(compile_missing, jobs=job_count(None), console=console)
    executor, _, _ = start_executor(options, compiler, console.print)
    return executor
