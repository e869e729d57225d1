"""Checks the messages of a chat request and puts them into the form that templates expect."""

from __future__ import annotations

import json
from typing import Any

from trnc.errors import RequestError, nearest
from trnc.serve.body import convert_object
from trnc.serve.openai.protocol import MESSAGE_RULES, TEXT_PART_RULES, Message

# Templates know no `developer`: it is OpenAI's newer name for the same thing.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NOT_YET = ("function",)


def template_messages(raw: list[Any]) -> list[dict[str, Any]]:
    """Return messages as a template wants them; `content` is a string or a list of text parts.

    Raises:
        RequestError: there is none, or one is malformed or needs what is not supported; `param`
            says which, such as `messages[1].content[0].type`.
    """
    if not raw:
        raise RequestError("'messages' must hold at least one message.", param="messages")
    return [_template_message(value, f"messages[{i}]") for i, value in enumerate(raw)]


def _template_message(value: Any, path: str) -> dict[str, Any]:
    _check_role(value, path)
    message = convert_object(value, MESSAGE_RULES, path=path)
    if message.content is None and not message.tool_calls:
        raise RequestError(f"'{path}.content' must be text.", param=f"{path}.content")
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) and message.role != role:
            where = f"{path}.{field}"
            raise RequestError(f"'{where}' belongs to a message of role {role}.", param=where)
    rendered = {
        "role": _ROLES[message.role],
        "content": None if message.content is None else _content(message, path),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or None,
        "tool_calls": _tool_calls(message, path) or None,
    }
    return {key: value for key, value in rendered.items() if value is not None}


def _tool_calls(message: Message, path: str) -> list[dict[str, Any]]:
    """Return calls as templates want them: with their arguments as an object, not as its text."""
    return [
        _tool_call(call, f"{path}.tool_calls[{i}]")
        for i, call in enumerate(message.tool_calls or [])
    ]


def _tool_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise RequestError(f"'{path}.function' must have a 'name'.", param=f"{path}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            where = f"{path}.function.arguments"
            raise RequestError(f"'{where}' is not valid JSON.", param=where) from None
    return {**call, "function": {"name": name, "arguments": arguments}}


def _check_role(value: Any, path: str) -> None:
    """Look at the role first: it explains the other fields of a message better than they do."""
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role in _ROLES:
        return  # the struct says what is wrong, if anything is
    param = f"{path}.role"
    if role in _NOT_YET:
        raise RequestError(
            f"'{param}': messages of a {role} are not supported by this server yet.",
            param=param,
            code="unsupported_field",
        )
    raise RequestError(
        f"'{param}' must be one of {', '.join(_ROLES)}.{nearest(role, _ROLES)}", param=param
    )


def _content(message: Message, path: str) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    return [_part(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]


def _part(part: dict[str, Any], path: str) -> dict[str, str]:
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"'{path}': content of type {str(kind)[:40]!r} is not supported by this server yet:"
            " use parts of type 'text'.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    return {"type": "text", "text": convert_object(part, TEXT_PART_RULES, path=path).text}
