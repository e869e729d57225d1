"""Chat templates against transformers' own rendering."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.errors import CheckpointError, RequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

PLAIN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- call.function.name }}: {{ call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif message.role == 'skip' %}
        {%- continue %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TRIMMED = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + ns.system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant are allowed, got " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
PARTS = """
{%- for message in messages %}
    {{- '[' + message.role + ']' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {% generation %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
"""
TEMPLATES = {"plain": PLAIN, "tools": TOOLS, "trimmed": TRIMMED, "parts": PARTS}

CHAT = [
    {"role": "user", "content": "What is <b>1 & 2</b>? "},
    {"role": "assistant", "content": 'Three,\n"I think" — ja  '},
    {"role": "user", "content": "Sure?"},
]
SYSTEM = [{"role": "system", "content": " Be brief. "}, *CHAT]
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'ü'"}}
CALLS = [
    *CHAT,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "ü": "<>"}}}],
    },
]


def reference(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, prompt: bool) -> None:
    for messages in (CHAT, SYSTEM) if name != "trimmed" else (CHAT, SYSTEM, CHAT[:1]):
        got = template(name).render(messages, add_generation_prompt=prompt)
        assert got == reference(TEMPLATES[name], messages, add_generation_prompt=prompt)


def test_tools_calls_and_variables() -> None:
    for variables in ({}, {"enable_thinking": False}):
        got = template("tools").render(CALLS, tools=[TOOL], variables=variables)
        assert got == reference(TOOLS, CALLS, tools=[TOOL], add_generation_prompt=True, **variables)
    assert "&" in got
    assert "<think>" in got


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_final_message_can_be_continued(name: str) -> None:
    for end in ("It is ", "It is"):
        messages = [*CHAT, {"role": "assistant", "content": end}]
        got = template(name).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert got == reference(TEMPLATES[name], messages, continue_final_message=True)
        assert got.endswith(end if name != "trimmed" else "It is")


def test_parts_are_joined_only_for_a_template_that_wants_a_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert "user\none\ntwo<|im_end|>" in template("plain").render(messages)
    assert "\n\none\ntwo<|eot_id|>" in template("trimmed").render(messages)
    assert "[user]onetwo" in template("parts").render(messages)
    prints_lists = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}", special_tokens={}
    )
    assert prints_lists.render(messages) == "one\ntwo"


def test_a_key_that_is_none_is_absent() -> None:
    text = "{% for m in messages %}{{ m.content is defined }}{{ 'name' in m }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "name": "x"}]
    assert ChatTemplate(text, special_tokens={}).render(messages) == "FalseTrue"
    assert reference(text, messages) == "FalseTrue"


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    for name in ("plain", "parts"):
        template(name).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize(
    ("name", "messages", "message", "param"),
    [
        ("trimmed", [{"role": "tool", "content": "x"}], "allowed, got tool", "messages"),
        ("plain", [{"role": "user"}], "template", "messages"),
        ("plain", [], None, None),
        ("trimmed", [], "template", "messages"),
        (
            "plain",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url'",
            "messages[0].content",
        ),
        ("plain", [{"role": "user", "content": ["x"]}], "'str'", "messages[0].content"),
        ("plain", [{"role": "user", "content": 3}], "template", "messages"),
    ],
)
def test_a_refusal_is_a_request_error(
    name: str, messages: list, message: str | None, param: str | None
) -> None:
    if message is None:
        assert template(name).render(messages) == "<|im_start|>assistant\n"
        return
    with pytest.raises(RequestError, match=message) as caught:
        template(name).render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}]])
def test_nothing_to_continue(messages: list) -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        template("plain").render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="exclude"):
        template("plain").render(CHAT, continue_final_message=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(text: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(text, special_tokens={}).render(CHAT)


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("ok\n{% if %}", special_tokens={})
