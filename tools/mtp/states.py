"""The target's states of every answer, on disk beside it: f16, in the order of the answers' file.

The file has no index: the lengths of the answers say where each begins. So an interrupted run is
cut back to whole answers and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtp.generation import Answer, read_lines
from mtp.target import Target, target_states


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One answer with the target's states: `tokens` [T] and `states` f16 [T, H].

    `prompt` of the tokens are the prompt's.
    """

    answer: Answer
    tokens: Tensor
    states: Tensor

    @property
    def prompt(self) -> int:
        """How many tokens the prompt has."""
        return len(self.answer.prompt_ids)


def states_path(answers: Path) -> Path:
    """Return where the states of a file of answers are."""
    return answers.with_suffix(".states")


def write_states(target: Target, answers: Path, *, bf16: bool, batch_tokens: int) -> Iterator[int]:
    """Append the states that are missing; yield how many answers each batch added."""
    lines, path = read_lines(answers), states_path(answers)
    row = target.config.hidden_size * 2
    path.touch()
    done = _whole(lines, path.stat().st_size // row)
    with path.open("r+b") as out:
        out.truncate(sum(map(_length, lines[:done])) * row)
        out.seek(0, 2)
        while done < len(lines):
            batch = _take(lines[done:], batch_tokens)
            for states in compute_states(target, batch, bf16=bf16):
                out.write(states.half().numpy().tobytes())
            out.flush()
            done += len(batch)
            yield len(batch)


def compute_states(target: Target, answers: Sequence[Answer], *, bf16: bool) -> list[Tensor]:
    """Return the states [T, H] of each answer. Padding comes last, so no token sees it."""
    sequences = [torch.tensor(a.prompt_ids + a.output_ids) for a in answers]
    tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        states = target_states(target, tokens)
    return [state[: len(tokens)] for state, tokens in zip(states, sequences, strict=True)]


def load_examples(answers: Path, hidden: int) -> list[Example]:
    """Map the answers whose states are there; their states stay on disk until they are used."""
    path = states_path(answers)
    if not path.exists() or path.stat().st_size < hidden * 2:
        return []
    states = torch.from_numpy(np.memmap(path, np.float16, "c")[: path.stat().st_size // 2])
    states = states[: len(states) // hidden * hidden].view(-1, hidden)
    examples, start = [], 0
    lines = read_lines(answers)
    for answer in lines[: _whole(lines, len(states))]:
        end = start + _length(answer)
        tokens = torch.tensor(answer.prompt_ids + answer.output_ids)
        examples.append(Example(answer, tokens, states[start:end]))
        start = end
    return sorted(examples, key=lambda e: e.answer.index)


def _length(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.output_ids)


def _whole(answers: Sequence[Answer], rows: int) -> int:
    """Return how many of the answers fit into so many rows."""
    ends = np.cumsum([0, *map(_length, answers)])
    return int(np.searchsorted(ends, rows, side="right")) - 1


def _take(answers: Sequence[Answer], tokens: int) -> list[Answer]:
    """Return the first answers, as many as a batch of so many tokens holds."""
    batch: list[Answer] = []
    for answer in answers:
        longest = max(map(_length, [*batch, answer]))
        if batch and longest * (len(batch) + 1) > tokens:
            break
        batch.append(answer)
    return batch
