"""From the fields of a request to the `Rules` of its tokens: grammars, limits, forbidden words.

One grammar has many names: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`,
SGLang's `json_schema`, `regex`, `ebnf` and `structural_tag`. All of them are read here, so that
they mean the same on every route. Whether a grammar is valid is found out by the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.messages import Grammar, Rules
from trnc.errors import RequestError, nearest
from trnc.serve.reasoning import ReasoningTags, thinking_of
from trnc.serve.sampling import check_token_ids, need_feature
from trnc.serve.structural_tags import any_of, element_of, tag_grammar
from trnc.serve.tools.formats import CallGrammar

MAX_SOURCE = 128 * 1024  # characters of a grammar
MAX_CHOICES = 1024
MAX_BAD_WORDS = 128


class RuleFields(Protocol):
    """The fields that say which tokens a text may have; None is "not set"."""

    @property
    def response_format(self) -> dict[str, Any] | None:
        """OpenAI's: `text`, `json_object` or `json_schema`; also `structural_tag`."""

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`."""

    @property
    def guided_json(self) -> str | dict[str, Any] | None:
        """A JSON schema."""

    @property
    def guided_regex(self) -> str | None:
        """A pattern for the whole text."""

    @property
    def guided_choice(self) -> list[str] | None:
        """The texts to choose from."""

    @property
    def guided_grammar(self) -> str | None:
        """An EBNF grammar whose start is `root`."""

    @property
    def json_schema(self) -> str | dict[str, Any] | None:
        """A JSON schema (SGLang's name)."""

    @property
    def regex(self) -> str | None:
        """A pattern for the whole text (SGLang's name)."""

    @property
    def ebnf(self) -> str | None:
        """An EBNF grammar (SGLang's name)."""

    @property
    def structural_tag(self) -> str | dict[str, Any] | None:
        """A structural tag of xgrammar."""

    @property
    def min_tokens(self) -> int | None:
        """How many tokens there are before the text may end."""

    @property
    def allowed_token_ids(self) -> list[int] | None:
        """The only tokens that may be picked."""

    @property
    def bad_words(self) -> list[str] | None:
        """Texts that must not be completed."""

    @property
    def thinking_token_budget(self) -> int | None:
        """The most tokens of reasoning."""


def token_rules(
    fields: RuleFields,
    *,
    calls: CallGrammar | None,
    text: tuple[Grammar, str] | None,
    prompt_ids: Sequence[int],
    max_tokens: int,
    tokenizer: Tokenizer,
    reasoning: ReasoningTags | None,
    vocab_size: int,
    features: Sequence[str],
) -> Rules:
    """Return the rules of a request, whose answer may be `calls` of tools.

    `text` is a grammar that a route brings of its own, with its field's name.

    Raises:
        RequestError: a field is malformed, two grammars are asked for, or the server runs without
            the feature; it names the field and the flag.
    """
    found = [*_grammars(fields), *([text] if text is not None else [])]
    chosen, param = _chosen(found, calls)
    if chosen is not None:
        need_feature(param, "structured_outputs", features)
        _check_size(chosen.source, param)
    return Rules(
        grammar=chosen,
        grammar_param=param,
        thinking=thinking_of(
            reasoning,
            tokenizer,
            prompt_ids,
            budget=_budget(fields.thinking_token_budget, reasoning, features),
            grammar=chosen is not None,
        ),
        allowed_token_ids=_allowed(fields.allowed_token_ids, vocab_size, features),
        bad_words=_bad_words(fields.bad_words, tokenizer, features),
        min_tokens=_min_tokens(fields.min_tokens, max_tokens, features),
    )


# Grammars


def _chosen(
    found: list[tuple[Grammar, str]], calls: CallGrammar | None
) -> tuple[Grammar | None, str]:
    """Return the one grammar of the answer and the field that asked for it.

    Where a text in a grammar may be calls of tools instead, it is either.
    """
    params = [param for _, param in found]
    if calls is not None and calls.must:
        params.append(calls.param)
    if len(params) > 1:
        names = " and ".join(f"'{param}'" for param in params)
        raise RequestError(f"{names} each ask for a grammar: set one.", param=params[1])
    if calls is None:
        return found[0] if found else (None, "response_format")
    if found:
        [(grammar, param)] = found
        return tag_grammar(any_of([calls.calls, element_of(grammar, param)])), param
    element = calls.calls if calls.must else calls.free
    return (None if element is None else tag_grammar(element)), calls.param


def _grammars(fields: RuleFields) -> Iterator[tuple[Grammar, str]]:
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _structured_outputs(fields.structured_outputs)
    for param, make in _NAMES.items():
        value = getattr(fields, param)
        if value is not None:
            yield make(value, param), param


def schema_grammar(schema: Any, param: str) -> Grammar:
    """Return the grammar of a JSON schema, which is an object, a boolean or the text of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestError(f"'{param}' is not valid JSON.", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"'{param}' must be a JSON schema: an object.", param=param)
    return Grammar("json_schema", json.dumps(schema))


def _regex(pattern: Any, param: str) -> Grammar:
    return Grammar("regex", _text(pattern, param))


def _ebnf(grammar: Any, param: str) -> Grammar:
    return Grammar("ebnf", _text(grammar, param))


def _choice(choices: Any, param: str) -> Grammar:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise RequestError(f"'{param}' must be a list of texts to choose from.", param=param)
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"'{param}' may have at most {MAX_CHOICES} choices.", param=param)
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return Grammar("ebnf", "root ::= " + " | ".join(quoted))


def _structural_tag(tag: Any, param: str) -> Grammar:
    if isinstance(tag, str):
        return Grammar("structural_tag", _text(tag, param))
    return Grammar("structural_tag", json.dumps(tag))


_Maker = Callable[[Any, str], Grammar]
_NAMES: Mapping[str, _Maker] = {
    "guided_json": schema_grammar,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": schema_grammar,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}
_OUTPUTS: Mapping[str, _Maker] = {
    "json": schema_grammar,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}


def _response_format(given: dict[str, Any]) -> Iterator[tuple[Grammar, str]]:
    param = "response_format"
    kind = given.get("type")
    known = {"text": 1, "json_object": 1, "json_schema": 2, "structural_tag": len(given)}
    if not isinstance(kind, str) or kind not in known:
        hint = nearest(kind, known) if isinstance(kind, str) else ""
        raise RequestError(
            f"'{param}.type' must be one of {', '.join(known)}.{hint}", param=f"{param}.type"
        )
    extra = [key for key in given if key not in ("type", kind)]
    if extra and kind != "structural_tag":
        raise RequestError(f"Unknown field '{param}.{extra[0][:64]}'.", param=param)
    if kind == "json_object":
        yield Grammar("json"), param
    elif kind == "structural_tag":
        yield _structural_tag(given, param), param
    elif kind == "json_schema":
        yield schema_grammar(_named_schema(given.get(kind), f"{param}.{kind}"), param), param


def _named_schema(named: Any, path: str) -> Any:
    """Read OpenAI's `{"name", "description", "schema", "strict"}`; the answer is always strict."""
    known = ("name", "description", "schema", "strict")
    if not isinstance(named, dict) or named.get("schema") is None:
        raise RequestError(f"'{path}' must have a 'schema'.", param=path)
    for key in named:
        if key not in known:
            raise RequestError(
                f"Unknown field '{path}.{key[:64]}'.{nearest(key, known)}", param=path
            )
    return named["schema"]


def _structured_outputs(given: dict[str, Any]) -> Iterator[tuple[Grammar, str]]:
    for key, value in given.items():
        param = f"structured_outputs.{key[:64]}"
        if value is None:
            continue
        if key == "json_object":
            if value is not True:
                raise RequestError(f"'{param}' must be true.", param=param)
            yield Grammar("json"), param
        elif key in _OUTPUTS:
            yield _OUTPUTS[key](value, param), param
        else:
            hint = nearest(key, [*_OUTPUTS, "json_object"])
            raise RequestError(f"Unknown field '{param}'.{hint}", param=param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"'{param}' must be a string that is not empty.", param=param)
    return value


def _check_size(source: str, param: str) -> None:
    if len(source) > MAX_SOURCE:
        raise RequestError(
            f"'{param}' has {len(source)} characters; a grammar may have {MAX_SOURCE}.",
            param=param,
            code="invalid_grammar",
        )


# The rest


def _budget(
    budget: int | None, reasoning: ReasoningTags | None, features: Sequence[str]
) -> int | None:
    if budget is None:
        return None
    param = "thinking_token_budget"
    need_feature(param, param.replace("_token", ""), features)
    if budget < 0:
        raise RequestError(f"'{param}' must be at least 0, got {budget}.", param=param)
    if reasoning is None:
        raise RequestError(
            f"'{param}': this server does not know how its model marks its reasoning"
            " (see --reasoning-parser).",
            param=param,
        )
    return budget


def _min_tokens(wanted: int | None, max_tokens: int, features: Sequence[str]) -> int:
    if not wanted:
        return 0
    need_feature("min_tokens", "min_tokens", features)
    if not 0 < wanted <= max_tokens:
        raise RequestError(
            f"'min_tokens' must be between 0 and the {max_tokens} tokens that there may be at"
            f" most, got {wanted}.",
            param="min_tokens",
        )
    return wanted


def _allowed(
    token_ids: list[int] | None, vocab_size: int, features: Sequence[str]
) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    need_feature("allowed_token_ids", "token_masks", features)
    if not token_ids:
        raise RequestError("'allowed_token_ids' must not be empty.", param="allowed_token_ids")
    check_token_ids(token_ids, "allowed_token_ids", vocab_size)
    return tuple(sorted(set(token_ids)))


def _bad_words(
    words: list[str] | None, tokenizer: Tokenizer, features: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, as it is at the start of a text and after a space."""
    if not words:
        return ()
    need_feature("bad_words", "token_masks", features)
    if len(words) > MAX_BAD_WORDS or not all(words):
        raise RequestError(
            f"'bad_words' must be at most {MAX_BAD_WORDS} texts that are not empty.",
            param="bad_words",
        )
    spelled = (
        tuple(tokenizer.encode(prefix + word.lstrip(" "), add_special_tokens=False))
        for word in words
        for prefix in ("", " ")
    )
    return tuple(dict.fromkeys(ids for ids in spelled if ids))
