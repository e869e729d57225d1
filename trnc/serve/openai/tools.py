"""The tools of a chat request, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trnc.errors import RequestError, nearest
from trnc.serve.answer import Tools
from trnc.serve.tools.request import ToolDemand

TOOL_PATH = "tools[{}].function"
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def chat_tools(tools: list[dict[str, Any]] | None) -> Tools:
    """Return the tools; raises RequestError for one that is malformed."""
    return [_tool(tool, i) for i, tool in enumerate(tools or [])]


def chat_demand(choice: str | dict[str, Any] | None, parallel: bool | None) -> ToolDemand:
    """Return what `tool_choice` and `parallel_tool_calls` demand; raises RequestError."""
    several = parallel is not False
    match choice:
        case None | "auto":
            return ToolDemand("auto", parallel=several)
        case "none":
            return ToolDemand("none")
        case "required":
            return ToolDemand("required", parallel=several)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolDemand("required", name, several)
    raise RequestError(
        "'tool_choice' must be 'none', 'auto', 'required', or"
        ' {"type": "function", "function": {"name": ...}}.',
        param="tool_choice",
    )


def _tool(tool: dict[str, Any], index: int) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        path = f"tools[{index}]"
        raise RequestError(
            f'\'{path}\' must be {{"type": "function", "function": {{...}}}}.', param=path
        )
    path = TOOL_PATH.format(index)
    for key in function:
        if key not in _FUNCTION_FIELDS:
            where = f"{path}.{key[:64]}"
            hint = nearest(key, _FUNCTION_FIELDS)
            raise RequestError(f"Unknown field '{where}'.{hint}", param=where)
    if not isinstance(function.get("parameters"), dict | None):
        where = f"{path}.parameters"
        raise RequestError(f"'{where}' must be a JSON schema: an object.", param=where)
    if not isinstance(function.get("strict"), bool | None):
        where = f"{path}.strict"
        raise RequestError(f"'{where}' must be a boolean.", param=where)
    return tool
