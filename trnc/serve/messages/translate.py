"""From Anthropic's conversation to the messages of a chat template."""

from __future__ import annotations

from typing import Any

from trnc.engine.messages import Grammar
from trnc.errors import RequestError, nearest
from trnc.serve.body import BodyRules, convert_object
from trnc.serve.messages.protocol import (
    MESSAGE_RULES,
    OUTPUT_CONFIG_RULES,
    OUTPUT_FORMAT_RULES,
    TEXT_RULES,
    THINKING_PARAM_RULES,
    THINKING_RULES,
    TOOL_CHOICE_RULES,
    TOOL_RESULT_RULES,
    TOOL_RULES,
    TOOL_USE_RULES,
    Conversation,
)
from trnc.serve.prompt import TemplateOptions
from trnc.serve.structured import schema_grammar
from trnc.serve.tools.request import ToolDemand

Messages = list[dict[str, Any]]

BUDGET_PARAM = "thinking.budget_tokens"


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


def thinking_budget(body: Conversation) -> int | None:
    """Return the most tokens of thinking, None where there is no limit; raises RequestError."""
    if body.thinking is None:
        return None
    thinking = convert_object(body.thinking, THINKING_RULES, path="thinking")
    budget = thinking.budget_tokens
    if (budget is None) == (thinking.type == "enabled"):
        raise RequestError(
            f"'{BUDGET_PARAM}' must be there exactly if 'thinking.type' is 'enabled'.",
            param=BUDGET_PARAM,
        )
    if budget is not None and budget < 1:
        raise RequestError(
            f"'{BUDGET_PARAM}' must be at least 1, got {budget}.", param=BUDGET_PARAM
        )
    return budget


def text_grammar(body: Conversation) -> tuple[Grammar, str] | None:
    """Return the grammar of the text, with the field that asks for it; raises RequestError."""
    if body.output_config is None:
        return None
    config = convert_object(body.output_config, OUTPUT_CONFIG_RULES, path="output_config")
    if config.format is None:
        return None
    param = "output_config.format"
    format = convert_object(config.format, OUTPUT_FORMAT_RULES, path=param)
    return schema_grammar(format.schema, f"{param}.schema"), param


def tool_demand(body: Conversation) -> ToolDemand:
    """Return what the request demands of calls; raises RequestError."""
    if body.tool_choice is None:
        return ToolDemand()
    choice = convert_object(body.tool_choice, TOOL_CHOICE_RULES, path="tool_choice")
    if not body.tools:
        raise RequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if (choice.name is None) == (choice.type == "tool"):
        param = "tool_choice.name"
        raise RequestError(f"'{param}' must be there exactly if the type is 'tool'.", param=param)
    several = not choice.disable_parallel_tool_use
    match choice.type:
        case "any" | "tool":
            return ToolDemand("required", choice.name, several)
        case mode:
            return ToolDemand(mode, parallel=several)


def template_tools(body: Conversation) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's chat shape; raises RequestError."""
    return [_tool(value, f"tools[{index}]") for index, value in enumerate(body.tools or ())]


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
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


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
