"""From the vocabulary in GGUF metadata to a `tokenizer.json` of the `tokenizers` library.

GGUF stores tokens, merges or scores, and the name of a pre-tokenizer; the regular expressions
behind these names are those of the models' own `tokenizer.json`. Two kinds are supported: `gpt2`
(byte-level BPE with merges) and `llama` (SentencePiece BPE with scores and byte fallback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trnc.errors import CheckpointError, nearest

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX_OF_PRE = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2_PRES = ("gpt-2", "olmo")
_DIGITS_PRES = ("smollm", "starcoder", "refact", "command-r")
_WHOLE_WORD_PRES = ("llama-bpe", "llama-v3", "llama3", "smaug-bpe", "tekken")
_BOS_PRES = _WHOLE_WORD_PRES  # llama.cpp adds a BOS for these unless the file says otherwise


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a `tokenizer.json` that encodes and decodes as the model expects.

    Raises:
        CheckpointError: a tokenizer or pre-tokenizer that is not supported, or a key that is
            missing.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"'tokenizer.ggml.model' is {model!r}, which is not supported. Supported: gpt2"
            " (byte-level BPE) and llama (SentencePiece BPE)."
        )
    tokens: Sequence[str] = _required(metadata, "tokenizer.ggml.tokens")
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or (1,) * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError("'tokenizer.ggml.token_type' and '.tokens' differ in length")
    body = _byte_level(metadata, tokens) if model == "gpt2" else _sentencepiece(metadata, tokens)
    special = (_CONTROL,) if model == "gpt2" else (_CONTROL, _UNKNOWN)
    added = [
        _added_token(index, tokens[index], special=kind in special)
        for index, kind in enumerate(kinds)
        if kind in (*special, _USER_DEFINED)
    ]
    post = _post_processor(metadata, tokens, model)
    return {"version": "1.0", "added_tokens": added, "post_processor": post, **body}


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if not metadata.get(key):
        raise CheckpointError(f"'{key}' is missing")
    return metadata[key]


def _added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": special}


def _post_processor(
    metadata: Mapping[str, Any], tokens: Sequence[str], model: str
) -> dict[str, Any] | None:
    """Return what adds BOS and EOS around a text, or None where nothing is added."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = model == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_PRES
    wanted = {"bos": add_bos, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    parts: dict[str, dict[str, Any]] = {}
    for name, add in wanted.items():
        if add:
            index = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if index is None or not 0 <= index < len(tokens):
                raise CheckpointError(f"'tokenizer.ggml.{name}_token_id' is missing or no token")
            parts[name] = {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
    if not parts:
        return None
    piece = {n: [{"SpecialToken": {"id": p["id"], "type_id": 0}}] for n, p in parts.items()}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    ends = piece.get("bos", []), piece.get("eos", [])
    return {
        "type": "TemplateProcessing",
        "single": [*ends[0], sequences[0], *ends[1]],
        "pair": [*ends[0], sequences[0], *ends[1], *ends[0], sequences[1], *ends[1]],
        "special_tokens": {p["id"]: p for p in parts.values()},
    }


# --- gpt2: byte-level BPE -------------------------------------------------------------------------


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    known = (*_REGEX_OF_PRE, *_GPT2_PRES, *_DIGITS_PRES)
    if pre not in known:
        raise CheckpointError(
            f"'tokenizer.ggml.pre' is {pre!r}, which is not supported.{nearest(str(pre), known)}"
            f" Supported: {', '.join(known)}."
        )
    merges = _required(metadata, "tokenizer.ggml.merges")
    model = {"type": "BPE", "vocab": _vocabulary(tokens), "merges": list(merges)}
    flags = {"byte_fallback": False, "fuse_unk": False, "ignore_merges": pre in _WHOLE_WORD_PRES}
    return {
        "normalizer": {"type": "NFC"} if _REGEX_OF_PRE.get(pre) == _QWEN2 else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "decoder": _BYTE_LEVEL,
        "model": {**model, **flags},
    }


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _pre_tokenizer(pre: str) -> dict[str, Any]:
    if pre in _GPT2_PRES:
        return _BYTE_LEVEL
    if pre in _DIGITS_PRES:
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _BYTE_LEVEL]}
    regex = {"Regex": _REGEX_OF_PRE[pre]}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    level = {**_BYTE_LEVEL, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise CheckpointError(f"'tokenizer.ggml.tokens' holds {twice!r} twice")
    return vocabulary


# --- llama: SentencePiece BPE ---------------------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    scores = _required(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError("'tokenizer.ggml.scores' and '.tokens' differ in length")
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    vocabulary = _vocabulary(tokens)
    plain = {t: i for t, i in vocabulary.items() if not kinds or kinds[i] == _NORMAL}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    flags = {"byte_fallback": True, "fuse_unk": True, "ignore_merges": False}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                back,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefix else []),
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "vocab": vocabulary,
            "merges": _merges(plain, scores),
            **flags,
        },
    }


def _merges(plain: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of every plain token into two tokens, best score first.

    SentencePiece joins the adjacent pair whose result has the best score, leftmost first; a merge
    list in the order of these scores makes BPE do the same.
    """
    merges = []
    for token, index in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                merges.append((-scores[index], plain[left], plain[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
