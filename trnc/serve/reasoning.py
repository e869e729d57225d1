"""Reasoning: what a model writes between its thinking tags, told apart from its answer.

Some models open the tag themselves, some chat templates open it for them, and some templates close
it at once where no thinking is wanted. The end of the prompt says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.messages import Thinking
from trnc.errors import RequestError

_BLANKS = ("\n", "\n\n", " ")
_TAIL = 16  # tokens of the prompt in which its last tag would be


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What encloses the reasoning."""

    start: str = "<think>"
    end: str = "</think>"


PARSERS: dict[str, ReasoningTags] = {
    "deepseek_r1": ReasoningTags(),
    "qwen3": ReasoningTags(),
    "glm45": ReasoningTags(),
}


def detect_reasoning(template: str | None) -> str | None:
    """Return the name of the parser for a model with this chat template, None if it has none."""
    if template is None or "</think>" not in template:
        return None
    return "glm45" if "<arg_key>" in template else "qwen3"


def is_open(tags: ReasoningTags, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool | None:
    """Return whether the prompt leaves its reader in the reasoning; None if it does not say.

    False: the template closed it, so what follows is the answer.
    """
    tail = tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(tags.start):
        return True
    return False if tail.endswith(tags.end) else None


def thinking_of(
    tags: ReasoningTags | None,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    budget: int | None,
    grammar: bool,
) -> Thinking | None:
    """Return how the engine tells the thoughts apart, where it has to: for a budget or a grammar.

    Raises:
        RequestError: the start of the thoughts is no single token, so they cannot be recognised.
    """
    if tags is None or (budget is None and not grammar):
        return None
    opened = is_open(tags, tokenizer, prompt_ids)
    if opened is False:
        return None
    start_id = tokenizer.token_to_id(tags.start)
    if start_id is None and not opened:
        if budget is None:
            return None  # it can think no thoughts that anybody would recognise
        raise RequestError(
            f"'thinking_token_budget': {tags.start} is no token of this model.",
            param="thinking_token_budget",
        )
    blanks = (tokenizer.encode(text, add_special_tokens=False) for text in _BLANKS)
    return Thinking(
        end_ids=tuple(tokenizer.encode(tags.end, add_special_tokens=False)),
        start_id=start_id,
        blank_ids=tuple(ids[0] for ids in blanks if len(ids) == 1),
        open=bool(opened),
        budget=budget,
    )
