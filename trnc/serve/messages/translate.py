"""From Anthropic's conversation to the messages of a chat template."""

from __future__ import annotations

from typing import Any

from trnc.errors import RequestError, nearest
from trnc.serve.body import BodyRules, convert_object
from trnc.serve.messages.protocol import (
    MESSAGE_RULES,
    OUTPUT_CONFIG_RULES,
    TEXT_RULES,
    THINKING_PARAM_RULES,
    THINKING_RULES,
    TOOL_CHOICE_RULES,
    TOOL_RESULT_RULES,
    TOOL_RULES,
    TOOL_USE_RULES,
    Conversation,
    ToolChoice,
)
from trnc.serve.prompt import TemplateOptions

Messages = list[dict[str, Any]]


def template_messages(body: Conversation) -> Messages:
    """Return the system prompt and the messages as a chat template wants them.

    Raises:
        RequestError: a message or block is malformed or not supported, or a tool result has no
            call that it answers.
    """
    if not body.messages:
        raise RequestError("'messages' must hold at least one message.", param="messages")
    messages: Messages = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    calls: set[str] = set()
    for index, value in enumerate(body.messages):
        path = f"messages[{index}]"
        message = convert_object(value, MESSAGE_RULES, path=path)
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, f"{path}.content", calls))
        elif message.role == "system":
            content = _texts(message.content, f"{path}.content")
            messages.append({"role": "system", "content": content})
        else:
            messages += _user(message.content, f"{path}.content", calls)
    return messages


def template_options(body: Conversation) -> TemplateOptions:
    """Return how to render: a conversation that ends with the assistant is gone on with.

    Thinking is off unless it is asked for, as in Anthropic's API.
    """
    last = body.messages[-1] if body.messages else None
    continues = isinstance(last, dict) and last.get("role") == "assistant"
    thinks = body.thinking is not None and body.thinking.get("type") != "disabled"
    return TemplateOptions(not continues, continues, {"enable_thinking": thinks})


def check_options(body: Conversation) -> ToolChoice:
    """Return how tools may be called; raises RequestError for what is not supported."""
    if body.output_config is not None:
        convert_object(body.output_config, OUTPUT_CONFIG_RULES, path="output_config")
    if body.thinking is not None:
        thinking = convert_object(body.thinking, THINKING_RULES, path="thinking")
        if thinking.type == "enabled":
            raise RequestError(
                "'thinking.budget_tokens' cannot be enforced by this server yet: use"
                ' {"type": "adaptive"} for thinking without a budget, or leave it out.',
                param="thinking.budget_tokens",
                code="unsupported_field",
            )
    if body.tool_choice is None:
        return ToolChoice("auto")
    choice = convert_object(body.tool_choice, TOOL_CHOICE_RULES, path="tool_choice")
    if not body.tools:
        raise RequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if choice.type in ("any", "tool"):
        raise RequestError(
            f"'tool_choice' of type '{choice.type}' is not supported by this server yet:"
            " use 'auto' or 'none'.",
            param="tool_choice.type",
            code="unsupported_field",
        )
    return choice


def template_tools(body: Conversation, choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools that may be called, in OpenAI's chat shape."""
    tools = [_tool(value, f"tools[{index}]") for index, value in enumerate(body.tools or ())]
    return [] if choice.type == "none" else tools


def _tool(value: dict[str, Any], path: str) -> dict[str, Any]:
    kind = value.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"'{path}.type': {str(kind)[:40]!r} runs at Anthropic; use tools with an"
            " 'input_schema' of your own.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    tool = convert_object(value, TOOL_RULES, path=path)
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _user(blocks: list[dict[str, Any]], path: str, calls: set[str]) -> Messages:
    """Return a user's message; tool results become messages of their own, in their order."""
    messages: Messages = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        kind = _kind(block, where, {"text": TEXT_RULES, "tool_result": TOOL_RESULT_RULES})
        if kind == "tool_result":
            messages.append(_tool_result(block, where, calls))
            continue
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"].append(_text_part(block, where))
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: dict[str, Any], path: str, calls: set[str]) -> dict[str, Any]:
    result = convert_object(block, TOOL_RESULT_RULES, path=path)
    if result.tool_use_id not in calls:
        raise RequestError(
            f"'{path}.tool_use_id': no earlier 'tool_use' block has this id.",
            param=f"{path}.tool_use_id",
        )
    content = _texts(result.content or "", f"{path}.content")
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}


def _assistant(blocks: list[dict[str, Any]], path: str, calls: set[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    thinking, tool_calls = "", []
    rules: dict[str, BodyRules[Any]] = {
        "text": TEXT_RULES,
        "thinking": THINKING_PARAM_RULES,
        "tool_use": TOOL_USE_RULES,
    }
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        kind = _kind(block, where, rules)
        converted = convert_object(block, rules[kind], path=where)
        if kind == "text":
            message["content"] += converted.text
        elif kind == "thinking":
            thinking += converted.thinking
        else:
            calls.add(converted.id)
            function = {"name": converted.name, "arguments": converted.input}
            tool_calls.append({"id": converted.id, "type": "function", "function": function})
    if thinking:
        message["reasoning_content"] = thinking
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _texts(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, str]]:
    """Return content that may only be text, as a string or as parts."""
    if isinstance(content, str):
        return content
    return [_text_part(block, f"{path}[{index}]") for index, block in enumerate(content)]


def _text_part(block: dict[str, Any], path: str) -> dict[str, str]:
    _kind(block, path, {"text": TEXT_RULES})
    return {"type": "text", "text": convert_object(block, TEXT_RULES, path=path).text}


def _kind(block: dict[str, Any], path: str, rules: dict[str, BodyRules[Any]]) -> str:
    """Return the type of a block; raises RequestError for one that does not belong here."""
    kind = block.get("type")
    if isinstance(kind, str) and kind in rules:
        return kind
    hint = nearest(kind, rules) if isinstance(kind, str) else ""
    raise RequestError(
        f"'{path}': a block of type {str(kind)[:40]!r} is not supported here; supported are"
        f" {', '.join(rules)}.{hint}",
        param=f"{path}.type",
        code="unsupported_field",
    )
