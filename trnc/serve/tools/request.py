"""The tools of a chat request: checked, and with them what `tool_choice` demands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.messages import Grammar
from trnc.errors import RequestError, nearest
from trnc.serve.answer import Tools
from trnc.serve.markup import Markup
from trnc.serve.tools.formats import call_grammar

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools` are what the model is told of; `grammar` is there where it must call one of them."""

    tools: Tools = ()
    grammar: tuple[Grammar, str] | None = None


def choose_tools(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool,
    markup: Markup,
    tokenizer: Tokenizer,
) -> ToolChoice:
    """Return what a request's tools come to.

    Raises:
        RequestError: a tool is malformed, the choice names none of them, or the server does not
            know how its model calls tools.
    """
    checked = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
    _check_names(checked)
    wanted = _wanted(checked, choice)
    if choice == "none" or not checked:
        return ToolChoice()
    if markup.tools is None:
        raise RequestError(
            "'tools': this server does not know how its model calls tools"
            " (see --tool-call-parser).",
            param="tools",
            code="unsupported_field",
        )
    if wanted is None:
        return ToolChoice(checked)
    grammar = call_grammar(markup.tools, wanted, tokenizer, parallel=parallel)
    return ToolChoice(checked, (grammar, "tool_choice"))


def _wanted(tools: Tools, choice: str | dict[str, Any] | None) -> Tools | None:
    """Return the tools of which one must be called; None where none must."""
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise RequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if choice == "required":
        return tools
    name = _named(choice)
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        hint = nearest(name, [tool["function"]["name"] for tool in tools])
        raise RequestError(f"'tool_choice': there is no tool '{name}'.{hint}", param="tool_choice")
    return chosen


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise RequestError(
            "'tool_choice' must be 'none', 'auto', 'required', or"
            ' {"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    return name


def _tool(tool: dict[str, Any], path: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(
            f'\'{path}\' must be {{"type": "function", "function": {{...}}}}.', param=path
        )
    for key in function:
        if key not in _FUNCTION_FIELDS:
            where = f"{path}.function.{key[:64]}"
            hint = nearest(key, _FUNCTION_FIELDS)
            raise RequestError(f"Unknown field '{where}'.{hint}", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"'{path}.function.name' must be 1 to 128 letters, digits or any of _.:/-",
            param=f"{path}.function.name",
        )
    if not isinstance(function.get("parameters"), dict | None):
        where = f"{path}.function.parameters"
        raise RequestError(f"'{where}' must be a JSON schema: an object.", param=where)
    return tool


def _check_names(tools: Tools) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if len(names) > MAX_TOOLS:
        raise RequestError(f"'tools' may be at most {MAX_TOOLS}.", param="tools")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"'tools': two of them have the name '{twice}'.", param="tools")
