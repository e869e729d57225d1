"""Text to token ids and back, without torch.

`load_tokenizer` reads a Hugging Face folder or a GGUF file. A `Detokenizer` turns a growing list of
ids into text that never has to be taken back: whatever way ids are pushed, the pushed texts and the
flushed rest join to exactly what `Tokenizer.decode` gives for all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from trnc.checkpoint.decoding import ByteStream, TextStream, classify, token_bytes
from trnc.checkpoint.generation import from_folder, read_json
from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.gguf_tokenizer import tokenizer_json
from trnc.checkpoint.source import Source, cache_dir
from trnc.errors import CheckpointError, RequestError

# Tokens that end an assistant's turn in the templates of the families that we know.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
)
_CACHE_FORMAT = 1  # raise it when `gguf_tokenizer` writes something else


class Tokenizer:
    """A tokenizer with the facts about its special tokens. Thread-safe; holds no state of a text.

    `eos_token_ids` are all the tokens that end a text: those of the tokenizer and of the generation
    config, and those that end a turn in the chat template. `special_tokens` maps names that a chat
    template may use (`bos_token`, `eos_token`, ...) to their text.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a backend. Raises CheckpointError if its decoder cannot be streamed exactly."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.decoding = classify(backend)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Special tokens spelled in it become their ids.

        `add_special_tokens` adds what the model wants around a text (such as BOS); a rendered chat
        template has them already.

        Raises:
            RequestError: the text has lone surrogates, which no UTF-8 can hold.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("The text is not valid Unicode: it has lone surrogates.") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an id that has none."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text in its middle, as bytes (maybe not whole UTF-8)."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            if token is None:  # not kept: there is no end of such ids
                return b""
            data = token_bytes(token, self.decoding, added=token_id in self.special_ids)
            self._bytes[token_id] = data
        return data


# --- decoding, token by token ---------------------------------------------------------------------


class Detokenizer:
    """The text of one growing list of ids. `push` returns only text that can change no more."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Start an empty text."""
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._tokenizer = tokenizer
        byte_level = tokenizer.decoding.byte_level
        self._stream = ByteStream() if byte_level else TextStream(tokenizer)

    def push(self, ids: Iterable[int]) -> str:
        """Append ids; return the text that became certain."""
        ids = [i for i in ids if i not in self._skipped]
        if isinstance(self._stream, ByteStream):
            return self._stream.push(b"".join(map(self._tokenizer.token_bytes, ids)))
        return self._stream.push([i for i in ids if self._tokenizer.id_to_token(i) is not None])

    def flush(self) -> str:
        """End the text; return what was held back (incomplete UTF-8 as U+FFFD)."""
        return self._stream.flush()


# --- loading --------------------------------------------------------------------------------------


def load_tokenizer(source: Source, *, cache: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    For a GGUF file the derived `tokenizer.json` is kept in the user's cache, since deriving it is
    slow for some vocabularies; the cache is only ever an optimisation.

    Raises:
        CheckpointError: no tokenizer, or one that is damaged or not supported.
    """
    try:
        if source.kind == "gguf":
            return _from_gguf(source.path, cache or cache_dir())
        return _from_folder(source)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from None


def _from_folder(source: Source) -> Tokenizer:
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            "no tokenizer.json. Load the tokenizer with transformers and save it with"
            " save_pretrained() to make one."
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"tokenizer.json is damaged or too new: {error}") from None
    config = read_json(source, "tokenizer_config.json")
    named = _named_tokens(config)
    _add_tokens(backend, config, named)
    template = _chat_template(source, config)
    eos = list(from_folder(read_json(source, "generation_config.json")).eos_token_ids)
    ends = [named.get("eos_token"), *(t for t in _TURN_ENDS if template and t in template)]
    eos += [i for t in ends if t and (i := backend.token_to_id(t)) is not None]
    bos = named.get("bos_token")
    return Tokenizer(
        backend=backend,
        bos_token_id=backend.token_to_id(bos) if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        chat_template=template,
        special_tokens=named,
    )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and so on; each is a string or an object with `content`."""
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add what only `tokenizer_config.json` knows, as transformers does."""
    for key, token in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda t: int(t[0])
    ):
        if backend.token_to_id(token["content"]) is None:
            flags = {
                k: token[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in token
            }
            backend.add_tokens(
                [AddedToken(token["content"], special=token.get("special", False), **flags)]
            )
        if backend.token_to_id(token["content"]) != int(key):
            raise CheckpointError(
                f"tokenizer_config.json: added token {token['content']!r} has id {key}, but"
                f" tokenizer.json gives it {backend.token_to_id(token['content'])}"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {t for t in named.values() if t not in known and backend.token_to_id(t) is not None}
    backend.add_special_tokens(sorted(missing))


def _chat_template(source: Source, config: Mapping[str, Any]) -> str | None:
    file = source.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        table = {entry["name"]: entry["template"] for entry in template}
        return table.get("default", next(iter(table.values()), None))
    return template


def _from_gguf(path: Path, cache: Path) -> Tokenizer:
    with GgufFile(path) as file:
        metadata = file.metadata
    backend = _derived(path, metadata, cache)
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    special = {f"{n}_token": tokens[i] for n, i in ids.items() if i is not None and i < len(tokens)}
    # A GGUF file has no list of ends, so the tokens that llama.cpp takes for ends count too.
    eos = [ids["eos"], *(metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eot", "eom"))]
    control = {tokens[i] for i in _special_ids(backend)}
    eos += [backend.token_to_id(token) for token in _TURN_ENDS if token in control]
    return Tokenizer(
        backend=backend,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special,
    )


def _special_ids(backend: Backend) -> list[int]:
    return [i for i, token in backend.get_added_tokens_decoder().items() if token.special]


def _derived(path: Path, metadata: Mapping[str, Any], cache: Path) -> Backend:
    """Return the backend of a GGUF file, from the cache where it is there and whole."""
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {_CACHE_FORMAT}"
    kept = cache / "tokenizers" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        digest, text = kept.read_bytes().split(b"\n", 1)
        if digest == hashlib.sha256(text).hexdigest().encode():
            return Backend.from_buffer(text)
    except (OSError, ValueError):
        pass  # not there or not whole: it is written anew
    text = json.dumps(tokenizer_json(metadata), ensure_ascii=False).encode()
    try:
        backend = Backend.from_buffer(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the tokenizer in the metadata is damaged: {error}") from None
    _keep(kept, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    return backend


def _keep(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
