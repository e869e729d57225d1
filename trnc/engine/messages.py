"""What crosses the process boundary between the API process and an engine, as msgspec structs.

The API process encodes `ToEngine`, the engine encodes `ToApi`, both as MessagePack in one ZeroMQ
frame. This module and `checkpoint.tokenizer` are all that the API process may import from below;
neither imports torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trnc.core import FinishReason, SamplingParams, TokenLogprobs

QUEUE_FULL = "queue_full"
MAX_WHITESPACE = 16  # characters in a row between the tokens of JSON in a grammar


class Grammar(msgspec.Struct, frozen=True):
    """What the text must be. `source` is a JSON schema, a regex, an EBNF grammar, or a structural
    tag of xgrammar as JSON; `json` takes any JSON object and has none.
    """

    kind: Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]
    source: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """How a text that thinks before it answers is told apart.

    The text is in its thoughts from the start if `open`; else the token `start_id` opens them,
    which may come after `blank_ids` only. `end_ids` close them. No more than `budget` tokens are
    thoughts, if it is given: then the end is forced.
    """

    end_ids: tuple[int, ...]
    start_id: int | None = None
    blank_ids: tuple[int, ...] = ()
    open: bool = False
    budget: int | None = None


class Rules(msgspec.Struct, frozen=True):
    """Which tokens a request may get; see `engine/rules.py` for what goes before what.

    `grammar` holds for what comes after the thoughts; `grammar_param` is the field of the client's
    request that asked for it. `allowed_token_ids` None allows all. No sequence of `bad_words` is
    completed. Until `min_tokens` are output, no stop token is.
    """

    grammar: Grammar | None = None
    grammar_param: str = "response_format"
    thinking: Thinking | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start a request. Token ids are checked by the sender; the engine checks the limits.

    `resume_ids` are output tokens that the client already has (from an engine that died): they are
    recomputed as context, are not sent again, and count towards `max_tokens` and the output index.
    `stop_token_ids` end the text (the eos ids are among them unless the request ignores eos).
    `fork_of` names a request that was submitted before with the same prompt: this one starts when
    that prompt's full pages are computed, and shares them. An unknown id asks for nothing.
    `prompt_logprobs_from` is the first token of the prompt whose log-probability is given, if
    `sampling.prompt_logprobs` asks for them; the token at 0 has none. Of the requests that wait,
    those of the highest `priority` are admitted first.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    resume_ids: tuple[int, ...] = ()
    fork_of: str | None = None
    rules: Rules = Rules()
    prompt_logprobs_from: int = 1
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; its row and pages are free from the next step on. No answer is sent."""

    request_id: str


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `Stats` at once (one is also sent about every second while there is work)."""


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix, if no request runs or waits; a `Flushed` answers."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop after the current step and exit with 0."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on; nothing is traced or compiled after this.

    `timings` maps a part of the start to its seconds, in order. `features` are the flags that the
    loaded variants have.
    """

    max_rows: int
    max_context: int
    page_size: int
    num_pages: int
    vocab_size: int
    timings: dict[str, float]
    features: tuple[str, ...] = ()


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Progress of a start, for people: one line, such as `loading 19 artifacts`."""

    line: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, in order. The last one has a `finish_reason`.

    The token that ended the text (eos or a stop id) is in `token_ids` too, as `stop_token_id`.
    `logprobs` is as long as `token_ids` when the request asked for them, else empty. Of the tokens
    so far, `drafted_tokens` were guessed by speculation and `accepted_tokens` of these were right.
    `prompt_logprobs` come with or before the first token, in order, in any number of deltas.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """What one step gave, in one message: each one that is sent wakes threads on both sides."""

    deltas: tuple[Delta, ...]


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `FlushCache`: how many pages were dropped; None: there were requests."""

    pages: int | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine refused or lost one request; the others go on.

    `code` tells the API process what it is to say of it, such as `QUEUE_FULL`.
    """

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters since the start, and gauges of now. Times are in seconds.

    `drafted` and `accepted` count the drafts that were checked and that were right, by how far
    ahead they were: the first entry is of the token after the next.
    """

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finished: int
    preemptions: int
    prefill_steps: int
    decode_steps: int
    draft_steps: int
    verify_steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    device_seconds: float
    host_seconds: float
    compiles_after_ready: int


ToEngine = Submit | Abort | GetStats | FlushCache | Shutdown
ToApi = Ready | Starting | Deltas | Failed | Stats | Flushed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_api = msgspec.msgpack.Decoder(ToApi)


def encode(message: ToEngine | ToApi) -> bytes:
    """Return the message as one MessagePack frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Return the message that an API process sent; raises msgspec.DecodeError if it is not one."""
    return _to_engine.decode(frame)


def decode_to_api(frame: bytes) -> ToApi:
    """Return the message that an engine sent; raises msgspec.DecodeError if it is not one."""
    return _to_api.decode(frame)
