"""Chat templates: Jinja2 programs from a checkpoint that turn messages into a prompt.

A template is untrusted code, so it runs in Jinja's immutable sandbox. The environment has what
transformers gives to templates (the same filters, globals and whitespace rules), so that a prompt
here is the prompt that the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trnc.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

_PROBE = "trnc-probe"
_TOOL_PROBE = "trnc_tool_probe"
_CUT = "trnc-continue-here "  # the space shows whether the template trims the message


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(self, text: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile a template; `special_tokens` (`bos_token`, ...) are variables of it.

        Raises:
            CheckpointError: the template is not valid Jinja.
        """
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)
        self.takes_parts = self._takes_parts()
        self.takes_tools = self._takes_tools()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        A message is a dict as in OpenAI's API; keys with the value None count as absent. Content
        that is a list of text parts is joined with newlines for a template that wants a string.
        With `continue_final_message` the prompt ends where the last message's content does, so
        that the model goes on with it. `variables` are further variables for the template.

        Raises:
            RequestError: a content part that is not text, messages that the template refuses (with
                its own words), or on which it fails.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        chat = [self._normalized(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(chat)
        values = {**self._special_tokens, "documents": None, **(variables or {})}
        values |= {"messages": chat, "tools": list(tools) if tools else None}
        values["add_generation_prompt"] = add_generation_prompt
        text = self._run(values)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, values: Mapping[str, Any]) -> str:
        try:
            return self._template.render(values)
        except TemplateError as error:
            raise RequestError(f"The chat template says: {error}", param="messages") from None
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(
                "The model's chat template fails on these messages:"
                f" {type(error).__name__}: {error}",
                param="messages",
            ) from None

    def _normalized(self, message: Message, index: int) -> dict[str, Any]:
        present = {key: value for key, value in message.items() if value is not None}
        content = present.get("content")
        if not isinstance(content, list | tuple):
            return present
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RequestError(
                    f"A content part of type '{kind}' is not supported: this model reads text.",
                    param=f"messages[{index}].content",
                )
        if self.takes_parts:
            present["content"] = [{"type": "text", "text": part["text"]} for part in content]
        else:
            present["content"] = "\n".join(part["text"] for part in content)
        return present

    def _takes_parts(self) -> bool:
        """Tell whether the template prints the text of a list of parts, by trying."""
        chat = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        values = {**self._special_tokens, "messages": chat, "add_generation_prompt": True}
        try:
            text = self._template.render(values)
        except Exception:  # a template that wants a string fails on a list
            return False
        # A template that wants a string may also print the list itself.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def _takes_tools(self) -> bool:
        """Tell whether the template prints the tools that it is given, by trying."""
        chat = [{"role": "user", "content": _PROBE}]
        function = {"name": _TOOL_PROBE, "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        try:
            return _TOOL_PROBE in self.render(chat, tools=tools)
        except RequestError:  # it cannot have been made for tools
            return False


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Append the mark to the last message's text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CUT
    elif content:
        content[-1]["text"] += _CUT
    else:
        raise RequestError(
            "'continue_final_message' needs a last message with content.",
            param="continue_final_message",
        )


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0:
        raise RequestError(
            "'continue_final_message': the chat template drops the end of the last message.",
            param="continue_final_message",
        )
    trimmed = not text.startswith(_CUT, at)  # then it would have trimmed the message as well
    return text[:at].rstrip() if trimmed else text[:at]


# --- the environment ------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Print JSON without Jinja's HTML escapes, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
