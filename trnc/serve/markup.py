"""The markup of a model: which tags enclose its reasoning, and how it calls tools.

Both are found out from its chat template, or named by `--reasoning-parser` and
`--tool-call-parser`. An answer is read with a parser that is made for it: whether it begins in the
reasoning is said by its prompt, and what its calls may be by its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import ConfigError, nearest
from trnc.serve.answer import (
    AnswerParser,
    Part,
    PlainAnswer,
    ReasoningPart,
    TextPart,
    Tools,
)
from trnc.serve.reasoning import PARSERS, ReasoningTags, detect_reasoning, is_open
from trnc.serve.text import ShownToken
from trnc.serve.tools.formats import FORMATS, CallReader, ToolFormat, detect_format
from trnc.serve.tools.scan import Held


@dataclass(frozen=True, slots=True)
class Markup:
    """What a model's answers are made of beside text; None where it has no such thing."""

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None

    def parser(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], tools: Tools = ()
    ) -> AnswerParser:
        """Return the parser of one answer; calls are looked for if there are tools."""
        reader = self.tools.reader(tools) if self.tools is not None and tools else None
        tags = self.reasoning
        opened = is_open(tags, tokenizer, prompt_ids) if tags is not None else False
        if tags is not None and opened is not False:
            return _MarkedAnswer(tags, reader, opened=bool(opened))
        return PlainAnswer() if reader is None else _MarkedAnswer(None, reader, opened=False)

    def is_special(self, tokenizer: Tokenizer, *, tools: bool) -> bool:
        """Whether some of it is special tokens, which a text leaves out unless told otherwise."""
        tags = self.tools.tags if self.tools is not None and tools else ()
        if self.reasoning is not None:
            tags = (*tags, self.reasoning.start, self.reasoning.end)
        return any(tokenizer.token_to_id(tag) in tokenizer.special_ids for tag in tags)


def choose_markup(template: str | None, *, reasoning: str, tools: str) -> Markup:
    """Return the markup of a model; `auto` looks at its chat template, `none` is none.

    Raises:
        ConfigError: there is no parser of that name; it names the flag and the nearest one.
    """
    if reasoning == "auto":
        reasoning = detect_reasoning(template) or "none"
    if tools == "auto":
        tools = detect_format(template) or "none"
    for flag, name, known in (
        ("--reasoning-parser", reasoning, PARSERS),
        ("--tool-call-parser", tools, FORMATS),
    ):
        if name != "none" and name not in known:
            names = ", ".join(("auto", "none", *known))
            raise ConfigError(f"{flag} {name}: it must be one of {names}.{nearest(name, known)}")
    return Markup(PARSERS.get(reasoning), FORMATS.get(tools))


class _MarkedAnswer:
    """Reads the reasoning first, if there is any, then text and calls."""

    def __init__(
        self, tags: ReasoningTags | None, reader: CallReader | None, *, opened: bool
    ) -> None:
        self._tags = tags
        self._reader = reader
        self._held = Held()
        self._thinking = opened
        self._answering = tags is None
        self._blank = opened  # whether newlines that come next belong to a tag
        self._tokens: list[ShownToken] = []

    def push(self, text: str, tokens: Sequence[ShownToken]) -> Sequence[Part]:
        """Return the parts that are certain after this piece of text."""
        self._tokens += tokens
        return self._with_tokens(self._read(text))

    def finish(self) -> Sequence[Part]:
        """Return what was held back, when no more text comes."""
        held, self._held.text = self._held.text, ""
        parts: list[Part] = []
        if held and self._thinking:
            parts.append(ReasoningPart(held))
        elif held:
            self._answering = True
            parts += self._answer(held)
        if self._reader is not None:
            parts += self._reader.finish()
        if self._tokens:
            parts.append(TextPart(""))
        return self._with_tokens(parts)

    def _read(self, text: str) -> list[Part]:
        if self._answering:
            return self._answer(text)
        tags = self._tags
        assert tags is not None, "an answer without tags has begun from the start"
        self._held.text += text
        if not self._thinking and not self._begins(tags):
            return self._answer(self._take()) if self._answering else []
        return self._think(tags)

    def _begins(self, tags: ReasoningTags) -> bool:
        """Whether the thoughts begin here; anything else but blanks makes it an answer."""
        rest = self._held.text.lstrip()
        if rest.startswith(tags.start):
            self._held.text = rest.removeprefix(tags.start)
            self._thinking, self._blank = True, True
        else:
            self._answering = not tags.start.startswith(rest)
        return self._thinking

    def _think(self, tags: ReasoningTags) -> list[Part]:
        if self._blank:
            self._held.text = self._held.text.lstrip("\n")
            self._blank = not self._held.text
        thought, ended = self._held.until(tags.end)
        parts: list[Part] = [ReasoningPart(thought)] if thought else []
        if ended:
            self._thinking, self._answering, self._blank = False, True, True
            parts += self._answer(self._take())
        return parts

    def _answer(self, text: str) -> list[Part]:
        if self._blank and self._tags is not None:
            text = text.lstrip("\n")
            self._blank = not text
        if not text:
            return []
        return self._reader.push(text) if self._reader is not None else [TextPart(text)]

    def _take(self) -> str:
        text, self._held.text = self._held.text, ""
        return text

    def _with_tokens(self, parts: list[Part]) -> list[Part]:
        """Give the tokens so far to the first part that is text."""
        for index, part in enumerate(parts):
            if isinstance(part, TextPart) and self._tokens:
                parts[index] = replace(part, tokens=tuple(self._tokens))
                self._tokens = []
        return parts
