"""Checks the messages of a chat request and puts them into the form that templates expect."""

from __future__ import annotations

from typing import Any

from trnc.errors import RequestError, nearest
from trnc.serve.body import convert_object
from trnc.serve.openai.protocol import MESSAGE_RULES, TEXT_PART_RULES, Message

# Templates know no `developer`: it is OpenAI's newer name for the same thing.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NOT_YET = ("tool", "function")


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
    if message.content is None:
        raise RequestError(f"'{path}.content' must be text.", param=f"{path}.content")
    rendered = {"role": _ROLES[message.role], "content": _content(message, path)}
    return rendered if message.name is None else {**rendered, "name": message.name}


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
