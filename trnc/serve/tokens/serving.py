"""Text to ids and back, by the paths that requests for answers take."""

from __future__ import annotations

from collections.abc import Sequence

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.engine_client import EngineClient
from trnc.serve.openai.common import served_model
from trnc.serve.openai.messages import template_messages
from trnc.serve.planner import context_size
from trnc.serve.prompt import PromptBuilder, template_options
from trnc.serve.sampling import check_token_ids
from trnc.serve.tokens.protocol import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenServing:
    """Answers /tokenize and /detokenize."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
        model_names: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._model_names = model_names

    async def tokenize(self, body: TokenizeRequest) -> TokenizeAnswer:
        """Return the ids that a prompt or a conversation has as a request.

        Raises:
            RequestError: neither or both are there, or what the request itself would raise.
        """
        served_model(body.model, self._model_names)
        length = context_size(self._engine.info)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Either 'prompt' or 'messages' should be provided.", param="prompt")
        if body.messages is not None:
            ids = await self._of_messages(body, body.messages)
            return TokenizeAnswer(len(ids), length, ids, self._strings(ids, body))
        prompt = "" if body.prompt is None else body.prompt
        _check_no_chat_fields(body)
        encoded = await self._prompts.encode(
            [prompt] if isinstance(prompt, str) else prompt,
            add_special_tokens=body.add_special_tokens is not False,
        )
        if isinstance(prompt, str):
            [ids] = encoded
            return TokenizeAnswer(len(ids), length, ids, self._strings(ids, body))
        strings = [self._strings(ids, body) or [] for ids in encoded]
        counts = [len(ids) for ids in encoded]
        return TokenizeAnswer(counts, length, encoded, strings if body.return_token_strs else None)

    async def _of_messages(self, body: TokenizeRequest, messages: list[object]) -> list[int]:
        options = template_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
        ids = await self._prompts.from_messages(
            template_messages(messages),
            "messages",
            options,
            add_special_tokens=bool(body.add_special_tokens),
        )
        return list(ids)

    def _strings(self, ids: Sequence[int], body: TokenizeRequest) -> list[str] | None:
        """Return the tokens as the vocabulary spells them, if they are asked for."""
        if not body.return_token_strs:
            return None
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeAnswer:
        """Return the text of ids. Unless told, `text` leaves special tokens out, as SGLang does.

        `prompt` then shows them, as vLLM does.

        Raises:
            RequestError: an id is not in the vocabulary, or ids and lists are mixed.
        """
        served_model(body.model, self._model_names)
        flat = [item for item in body.tokens if isinstance(item, int)]
        lists = [item for item in body.tokens if not isinstance(item, int)]
        if flat and lists:
            raise RequestError(
                "'tokens' must be a list of token ids, or a list of such lists.", param="tokens"
            )
        batch = lists or [flat]
        for ids in batch:
            check_token_ids(ids, "tokens", self._engine.info.vocab_size)
        skip = body.skip_special_tokens
        text = await self._prompts.decode(batch, skip_special_tokens=skip is not False)
        prompt = await self._prompts.decode(batch, skip_special_tokens=skip is True)
        return DetokenizeAnswer(text, prompt) if lists else DetokenizeAnswer(text[0], prompt[0])


def _check_no_chat_fields(body: TokenizeRequest) -> None:
    for name in _CHAT_FIELDS:
        if getattr(body, name) is not None:
            raise RequestError(f"'{name}' needs 'messages'.", param=name)
