"""Log-probabilities in OpenAI's two shapes.

A token is named by its text, or, where its bytes are not whole characters, as `bytes:\\xNN...`,
which is OpenAI's spelling too.
"""

from __future__ import annotations

from collections.abc import Sequence

from trnc.checkpoint.tokenizer import Detokenizer, Tokenizer
from trnc.core import TokenLogprobs
from trnc.serve.openai.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from trnc.serve.text import ShownToken

FLOOR = -9999.0  # OpenAI's value for "as good as impossible"; JSON has no infinity


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return chat's shape of the log-probabilities that came with `tokens`."""
    return ChatLogprobs([_chat_entry(token, tokenizer) for token in tokens])


def completion_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    """Return completions' shape; the chosen token is always among the top ones."""
    result = CompletionLogprobs([], [], [], [])
    for token in tokens:
        assert token.logprobs is not None, "asked for only where the request asked for them"
        name = token_name(token.token_id, tokenizer)
        logprob = _finite(token.logprobs.logprob)
        result.tokens.append(name)
        result.token_logprobs.append(logprob)
        result.text_offset.append(token.offset)
        top = {token_name(i, tokenizer): _finite(value) for i, value in token.logprobs.top}
        result.top_logprobs.append({**top, name: logprob})
    return result


def prompt_logprobs(
    prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> PromptLogprobs:
    """Return vLLM's shape of the prompt's log-probabilities; the first token has none."""
    shaped: PromptLogprobs = [None]
    for token_id, entry in zip(prompt_ids[1:], entries, strict=True):
        ranked: list[tuple[int, float, int | None]] = [
            (i, value, rank) for rank, (i, value) in enumerate(entry.top, start=1)
        ]
        if token_id not in {i for i, _, _ in ranked}:
            ranked.append((token_id, entry.logprob, None))
        shaped.append(
            {
                str(i): PromptLogprob(_finite(value), rank, token_name(i, tokenizer))
                for i, value, rank in ranked
            }
        )
    return shaped


def echoed_logprobs(
    prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Return completions' shape of the prompt's log-probabilities, for `echo`."""
    result = CompletionLogprobs([], [], [], [])
    text, offset = Detokenizer(tokenizer), 0
    for token_id, entry in zip(prompt_ids, [None, *entries], strict=True):
        name = token_name(token_id, tokenizer)
        result.tokens.append(name)
        result.text_offset.append(offset)
        offset += len(text.push([token_id]))
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(entry.logprob))
        top = {token_name(i, tokenizer): _finite(value) for i, value in entry.top}
        result.top_logprobs.append({**top, name: _finite(entry.logprob)})
    return result


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """Return the text of one token, or its bytes where they are not text."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_entry(token: ShownToken, tokenizer: Tokenizer) -> TokenLogprob:
    assert token.logprobs is not None, "asked for only where the request asked for them"
    return TokenLogprob(
        token=token_name(token.token_id, tokenizer),
        logprob=_finite(token.logprobs.logprob),
        bytes=list(tokenizer.token_bytes(token.token_id)),
        top_logprobs=[
            TopLogprob(token_name(i, tokenizer), _finite(value), list(tokenizer.token_bytes(i)))
            for i, value in token.logprobs.top
        ],
    )


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
