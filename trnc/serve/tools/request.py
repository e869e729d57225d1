"""The tools of a request, in OpenAI's chat shape, and what it demands of their calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError, nearest
from trnc.serve.answer import Tools
from trnc.serve.markup import Markup
from trnc.serve.tools.formats import CallGrammar, call_grammar

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolDemand:
    """Whether tools may or must be called; `name` is the one that must be. `parallel`: several."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools` are what the model is told of; `calls` what its answer may be, None without tools."""

    tools: Tools = ()
    calls: CallGrammar | None = None


def choose_tools(
    tools: Tools,
    demand: ToolDemand,
    *,
    path: str,
    markup: Markup,
    tokenizer: Tokenizer,
) -> ToolChoice:
    """Return what a request's tools come to; `path` is where the function of tool `{}` is.

    Raises:
        RequestError: a name is wrong, the demand names no tool, or the server does not know how its
            model calls tools.
    """
    _check_names(tools, path)
    wanted = _wanted(tools, demand)
    if demand.mode == "none" or not tools:
        return ToolChoice()
    if markup.tools is None:
        raise RequestError(
            "'tools': this server does not know how its model calls tools"
            " (see --tool-call-parser).",
            param="tools",
            code="unsupported_field",
        )
    strict = [i for i, tool in enumerate(tools) if tool["function"].get("strict")]
    must = demand.mode == "required"
    calls = call_grammar(
        markup.tools,
        wanted,
        tokenizer,
        parallel=demand.parallel,
        must=must,
        param="tool_choice" if must or not strict else f"{path.format(strict[0])}.strict",
    )
    return ToolChoice(tools, calls)


def _wanted(tools: Tools, demand: ToolDemand) -> Tools:
    """Return the tools that may be called."""
    if demand.mode == "required" and not tools:
        raise RequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if demand.name is None:
        return tools
    chosen = [tool for tool in tools if tool["function"]["name"] == demand.name]
    if not chosen:
        hint = nearest(demand.name, [tool["function"]["name"] for tool in tools])
        raise RequestError(
            f"'tool_choice': there is no tool '{demand.name[:128]}'.{hint}", param="tool_choice"
        )
    return chosen


def _check_names(tools: Tools, path: str) -> None:
    names: list[Any] = [tool["function"].get("name") for tool in tools]
    if len(names) > MAX_TOOLS:
        raise RequestError(f"'tools' may be at most {MAX_TOOLS}.", param="tools")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            where = f"{path.format(i)}.name"
            raise RequestError(
                f"'{where}' must be 1 to 128 letters, digits or any of _.:/-", param=where
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"'tools': two of them have the name '{twice}'.", param="tools")
