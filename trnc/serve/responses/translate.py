"""From the items of the Responses API to the messages of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trnc.engine.messages import Grammar
from trnc.errors import RequestError, nearest
from trnc.serve.body import convert_object
from trnc.serve.responses.protocol import (
    FUNCTION_CALL_OUTPUT_RULES,
    FUNCTION_CALL_RULES,
    FUNCTION_TOOL_RULES,
    MESSAGE_ITEM_RULES,
    NAMED_TOOL_RULES,
    REASONING_ITEM_RULES,
    REASONING_RULES,
    STREAM_OPTIONS_RULES,
    TEXT_CONFIG_RULES,
    TEXT_CONTENT_RULES,
    TEXT_FORMAT_RULES,
    FunctionCall,
    Item,
    OutputMessage,
    Reasoning,
    ResponsesRequest,
)
from trnc.serve.structured import schema_grammar
from trnc.serve.tools.request import ToolDemand

Messages = list[dict[str, Any]]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
# The logprobs are in every answer that asked for `top_logprobs`; reasoning is never encrypted,
# all of its text is in the item.
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")


def input_messages(body: ResponsesRequest, before: Sequence[dict[str, Any]]) -> Messages:
    """Return the messages that the input adds to those `before`.

    What the assistant did in consecutive items (thinking, text, calls) becomes one message.

    Raises:
        RequestError: an item is malformed or not supported, or an output has no call.
    """
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("'input' must hold at least one item.", param="input")
    messages: Messages = []
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    for index, value in enumerate(body.input):
        _add_item(value, f"input[{index}]", messages, calls)
    return messages


def output_message(items: Sequence[Item]) -> dict[str, Any]:
    """Return an answer as the message that it is for the next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        if isinstance(item, OutputMessage):
            message["content"] += "".join(part.text for part in item.content)
        elif isinstance(item, FunctionCall):
            arguments = _object(item.arguments)
            if arguments is not None:  # else the token limit cut it short
                _add_call(message, item.call_id, item.name, arguments)
        else:
            text = "".join(part.text for part in item.content)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    return message


def template_tools(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the tools in the shape of chat; raises RequestError."""
    return [_tool(value, f"tools[{index}]") for index, value in enumerate(body.tools or ())]


def tool_demand(body: ResponsesRequest) -> ToolDemand:
    """Return what the request demands of calls; raises RequestError."""
    several = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None | "auto":
            return ToolDemand("auto", parallel=several)
        case "none":
            return ToolDemand("none")
        case "required":
            return ToolDemand("required", parallel=several)
        case {"type": "function"} as named:
            tool = convert_object(named, NAMED_TOOL_RULES, path="tool_choice")
            return ToolDemand("required", tool.name, several)
    given = msgspec.json.encode(body.tool_choice).decode()[:60]
    raise RequestError(
        f'\'tool_choice\': {given} is not supported: use "auto", "none", "required", or'
        ' {"type": "function", "name": ...}.',
        param="tool_choice",
        code="unsupported_field",
    )


def text_grammar(body: ResponsesRequest) -> tuple[Grammar, str] | None:
    """Return the grammar of the text, with the field that asks for it; raises RequestError."""
    if body.text is None:
        return None
    given = convert_object(body.text, TEXT_CONFIG_RULES, path="text").format
    if given is None:
        return None
    param = "text.format"
    format = convert_object(given, TEXT_FORMAT_RULES, path=param)
    if format.type == "json_schema":
        if format.schema is None:
            raise RequestError(f"'{param}.schema' is required.", param=f"{param}.schema")
        return schema_grammar(format.schema, f"{param}.schema"), param
    if format.schema is not None:
        raise RequestError(f"'{param}.schema' needs the type 'json_schema'.", param=param)
    return (Grammar("json"), param) if format.type == "json_object" else None


def check_settings(body: ResponsesRequest) -> Reasoning:
    """Return the reasoning settings; raises RequestError for what is not supported."""
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError(
                "'stream_options' is only allowed with 'stream': true.", param="stream_options"
            )
        convert_object(body.stream_options, STREAM_OPTIONS_RULES, path="stream_options")
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise RequestError(
                f"'include[{index}]': '{name[:60]}' is not supported; supported are"
                f" {', '.join(_INCLUDES)}.",
                param=f"include[{index}]",
            )
    return _reasoning(body.reasoning)


def _reasoning(value: dict[str, Any] | None) -> Reasoning:
    if value is None:
        return Reasoning()
    reasoning = convert_object(value, REASONING_RULES, path="reasoning")
    if reasoning.effort not in (None, "none"):
        raise RequestError(
            f"'reasoning.effort': '{reasoning.effort[:40]}' is not supported by this server yet:"
            ' leave it out, or set it to "none".',
            param="reasoning.effort",
            code="unsupported_field",
        )
    if reasoning.summary not in (None, "auto"):
        raise RequestError(
            "'reasoning.summary' must be \"auto\": reasoning is given whole, never summarised.",
            param="reasoning.summary",
            code="unsupported_field",
        )
    return reasoning


def _tool(value: dict[str, Any], path: str) -> dict[str, Any]:
    kind = value.get("type")
    if kind != "function":
        raise RequestError(
            f"'{path}.type': tools of type {str(kind)[:40]!r} are not supported: use 'function'.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    tool = convert_object(value, FUNCTION_TOOL_RULES, path=path)
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": parameters,
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _add_item(value: Any, path: str, messages: Messages, calls: set[str]) -> None:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    if kind not in _KINDS:
        raise RequestError(
            f"'{path}': an item of type {str(kind)[:40]!r} is not supported; supported are"
            f" {', '.join(_KINDS)}.{nearest(str(kind), _KINDS)}",
            param=f"{path}.type",
            code="unsupported_field",
        )
    if kind == "message":
        message = convert_object(value, MESSAGE_ITEM_RULES, path=path)
        content = _content(message.content, f"{path}.content")
        if message.role == "assistant":
            _assistant(messages)["content"] += _joined(content)
        else:
            messages.append({"role": _ROLES[message.role], "content": content})
    elif kind == "function_call":
        call = convert_object(value, FUNCTION_CALL_RULES, path=path)
        calls.add(call.call_id)
        arguments = _object(call.arguments)
        if arguments is None:
            raise RequestError(
                f"'{path}.arguments' must be a JSON object, as text.", param=f"{path}.arguments"
            )
        _add_call(_assistant(messages), call.call_id, call.name, arguments)
    elif kind == "function_call_output":
        _add_output(value, path, messages, calls)
    else:
        item = convert_object(value, REASONING_ITEM_RULES, path=path)
        text = _joined(_content(item.content or item.summary or "", f"{path}.content"))
        answer = _assistant(messages)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _add_output(value: Any, path: str, messages: Messages, calls: set[str]) -> None:
    item = convert_object(value, FUNCTION_CALL_OUTPUT_RULES, path=path)
    if item.call_id not in calls:
        raise RequestError(
            f"'{path}.call_id': no earlier 'function_call' has the call_id '{item.call_id[:64]}'.",
            param=f"{path}.call_id",
        )
    content = _content(item.output, f"{path}.output")
    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _add_call(message: dict[str, Any], call_id: str, name: str, arguments: dict[str, Any]) -> None:
    """Add a call to a message. Templates want its arguments as an object."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    message.setdefault("tool_calls", []).append(call)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _assistant(messages: Messages) -> dict[str, Any]:
    """Return the assistant's message at the end, begun if need be."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [_text_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _text_part(part: dict[str, Any], path: str) -> dict[str, str]:
    kind = part.get("type")
    if kind not in ("input_text", "output_text", "reasoning_text", "summary_text"):
        raise RequestError(
            f"'{path}': content of type {str(kind)[:40]!r} is not supported: this model reads"
            " text, as 'input_text' or 'output_text'.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    return {"type": "text", "text": convert_object(part, TEXT_CONTENT_RULES, path=path).text}


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
