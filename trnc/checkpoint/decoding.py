"""How decoders of the `tokenizers` library join tokens, so that a text can be streamed exactly.

Two kinds are streamed: byte-level ones, where a text is the UTF-8 of all tokens' bytes in a row,
and those that build text out of SentencePiece pieces. Any other decoder is refused when the
tokenizer is loaded, since its text could change after it was sent.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer as Backend

from trnc.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a decoder does.

    `byte_fallback`: tokens such as `<0xE4>` are bytes. `spaces` is what stands for a space inside a
    token, None where nothing does. `anchor` is an ordinary token that can stand before any other.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    spaces: str | None = None
    anchor: int = 0


def classify(backend: Backend) -> Decoding:
    """Read the decoder of a backend. Raises CheckpointError for one that cannot be streamed."""
    if backend.decoder is None:  # tokens are joined with spaces
        return Decoding(anchor=_anchor(backend))
    state = json.loads(backend.decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return Decoding(byte_level=True)
    spaces = None
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    for part in parts:
        kind = part["type"]
        if kind == "Metaspace":
            spaces = part["replacement"]
        elif kind == "Replace" and "String" in part["pattern"] and part["content"] == " ":
            spaces = part["pattern"]["String"]
        elif not (kind in ("ByteFallback", "Fuse") or (kind == "Strip" and part["stop"] == 0)):
            raise CheckpointError(
                f"tokenizer.json: the decoder {kind} is not supported; supported are ByteLevel,"
                " Metaspace, and Replace, ByteFallback, Fuse and Strip (at the start) in sequence"
            )
    fallback = any(part["type"] == "ByteFallback" for part in parts)
    return Decoding(byte_fallback=fallback, spaces=spaces, anchor=_anchor(backend))


def _anchor(backend: Backend) -> int:
    for token_id in range(backend.get_vocab_size()):
        token = backend.id_to_token(token_id)
        if token is not None and token.isascii() and token.isalnum():
            return token_id
    raise CheckpointError("tokenizer.json: no token is a plain word, so nothing can be streamed")


def token_bytes(token: str, decoding: Decoding, *, added: bool) -> bytes:
    """Return what a token adds to the middle of a text; `added` tokens are spelled as they are."""
    if decoding.byte_level:
        return _byte_level_bytes(token)
    if decoding.byte_fallback and _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    if decoding.spaces is not None and not added:
        token = token.replace(decoding.spaces, " ")
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Return a token's bytes; one with any other character stands for itself (added tokens)."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


class ByteStream:
    """Joins bytes to text; an incomplete character is held back."""

    def __init__(self) -> None:
        """Start an empty text."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """Append bytes; return the characters that are whole."""
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what was held back as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class Decoder(Protocol):
    """The part of a `Tokenizer` that a `TextStream` needs."""

    decoding: Decoding

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""


class TextStream:
    """Joins SentencePiece-like tokens to text. Two rules make it more than adding strings.

    The start of a text loses a space: until there is some text, all ids are decoded from the start,
    and afterwards behind the anchor, whose own text is then cut off. A run of byte tokens is text
    if it is UTF-8 as a whole, otherwise one U+FFFD for each byte: so it is held back until another
    token ends it.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Start an empty text."""
        self._decoder = decoder
        self._held: list[int] = []
        self._started = False

    def push(self, ids: Sequence[int]) -> str:
        """Append ids that have tokens; return the text that became certain."""
        self._held += ids
        certain = len(self._held)
        if self._decoder.decoding.byte_fallback:
            while certain and self._is_byte(self._held[certain - 1]):
                certain -= 1
        return self._take(certain)

    def flush(self) -> str:
        """Return the text of all that was held back."""
        return self._take(len(self._held))

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._decoder.id_to_token(token_id) or "") is not None

    def _take(self, count: int) -> str:
        ids = self._held[:count]
        if not ids:
            return ""
        if self._started:
            anchor = self._decoder.decoding.anchor
            text = self._decode([anchor, *ids])[len(self._decode([anchor])) :]
        else:
            text = self._decode(ids)
        if self._started or text:
            self._started = True
            del self._held[:count]
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False)
