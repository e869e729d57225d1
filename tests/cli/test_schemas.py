"""Two hundred answers of the default model in JSON schemas, beside plain ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.cli.test_serve import MODEL, Server, finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNT, STREAMS = 200, 8
PLAIN = ["What is the capital of France?", "Count to five.", "Say something kind."]


@pytest.fixture(scope="module")
def server(own_store: None) -> Iterator[Server]:
    server = start("--preset", "batch8", "--structured-outputs")
    yield server
    server.process.kill()
    finish(server)


def schema_of(picks: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short, whoever writes them."""
    leaves: list[dict[str, Any]] = [
        {"enum": ["rot", "grün", "青", 7, None, True]},
        {"type": "integer", "minimum": -20, "maximum": 150},
        {"type": "number", "minimum": -1.5, "maximum": 9.25},
        {"type": "boolean"},
        {"type": "string", "maxLength": 12},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"const": "naïve 🙂"},
    ]
    kind = picks.choice(["object", "object", "array", "leaf"]) if depth else "leaf"
    if kind == "array":
        items = schema_of(picks, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    if kind == "leaf":
        return picks.choice(leaves)
    names = picks.sample(["name", "größe", "tags", "id"], picks.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: schema_of(picks, depth - 1) for name in names},
        "required": picks.sample(names, picks.randint(0, len(names))),
        "additionalProperties": False,
    }


async def ask(client: openai.AsyncOpenAI, prompt: str, *, stream: bool, **fields: Any) -> str:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 500,
        **fields,
    }
    if not stream:
        choice = (await client.chat.completions.create(**options)).choices[0]
        assert choice.finish_reason == "stop" or "response_format" not in fields
        return choice.message.content or ""
    chunks = await client.chat.completions.create(**options, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def constrained(client: openai.AsyncOpenAI, number: int) -> None:
    schema = {"type": "object", "properties": {"it": schema_of(random.Random(number))}}
    schema |= {"required": ["it"], "additionalProperties": False}
    text = await ask(
        client,
        f"Give me an example of this in JSON, number {number}.",
        stream=number % 2 == 0,
        seed=number,
        temperature=number % 3 / 2,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    )
    jsonschema.validate(json.loads(text), schema)


def test_every_answer_keeps_to_its_schema_and_plain_ones_do_not_change(server):
    async def main() -> None:
        client = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        )
        plain = {"max_tokens": 24, "temperature": 0}
        alone = {p: await ask(client, p, stream=False, **plain) for p in PLAIN}
        slots = asyncio.Semaphore(STREAMS)

        async def one(number: int) -> None:
            async with slots:
                await constrained(client, number)
            if number % 10 == 0:
                prompt = PLAIN[number // 10 % len(PLAIN)]
                async with slots:
                    assert await ask(client, prompt, stream=True, **plain) == alone[prompt]

        await asyncio.gather(*(one(number) for number in range(COUNT)))

    asyncio.run(main())
