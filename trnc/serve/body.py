"""Decoding of JSON request bodies: strict types, and no field that is silently ignored.

A field of a body is one of four things: a field of the request's struct; one that is knowingly
without effect (`Inert`); one that is accepted at its neutral value only (`Refused`); or unknown,
which is a 400 with the nearest match. The tables are data beside each API's structs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from trnc.errors import RequestError, nearest

T = TypeVar("T")

_PATH = re.compile(r"^(?P<what>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?P<what>unknown|missing required) field `(?P<name>.*?)`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Inert:
    """A field that is accepted and has no effect on the answer, and why that is right."""

    type: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not supported: accepted only where its value asks for nothing."""

    neutral: tuple[Any, ...] = (None,)


@dataclass(frozen=True, slots=True)
class BodyRules(Generic[T]):
    """How one kind of body is decoded."""

    struct: type[T]
    inert: Mapping[str, Inert]
    refused: Mapping[str, Refused]


def decode_body(body: bytes, rules: BodyRules[T]) -> T:
    """Return the request that a body holds.

    Raises:
        RequestError: it is not JSON, not an object, or a field is unknown, of the wrong type or
            not supported; `param` names the field.
    """
    return convert_object(_parse(body), rules, path="")


def convert_object(value: Any, rules: BodyRules[T], *, path: str) -> T:
    """Return the struct that one JSON object holds; `path` is where it is, for messages."""
    if not isinstance(value, dict):
        where = f"'{path}'" if path else "The request body"
        raise RequestError(f"{where} must be a JSON object.", param=path or None)
    known = {field.encode_name for field in msgspec.structs.fields(rules.struct)}  # type: ignore[arg-type]
    fields = {}
    for name, given in value.items():
        if name in known:
            fields[name] = given
        elif name in rules.refused:
            _check_neutral(given, rules.refused[name], _join(path, name))
        elif name in rules.inert:
            _convert(given, rules.inert[name].type | None, _join(path, name))
        else:
            param = _join(path, name[:64])
            hint = nearest(name, [*known, *rules.refused, *rules.inert])
            raise RequestError(f"Unknown field '{param}'.{hint}", param=param, code="unknown_field")
    struct: T = _convert(fields, rules.struct, path)
    return struct


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        reason = "it is nested too deeply"
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
    raise RequestError(f"The request body is not valid JSON: {reason}.", code="invalid_json")


def _check_neutral(given: Any, rule: Refused, param: str) -> None:
    # bool is an int in Python: `0 == False`, so the types are compared too.
    if any(type(given) is type(value) and given == value for value in rule.neutral):
        return
    accepted = " or ".join(msgspec.json.encode(value).decode() for value in rule.neutral)
    raise RequestError(
        f"'{param}' is not supported by this server yet: leave it out, or set it to {accepted}.",
        param=param,
        code="unsupported_field",
    )


def _convert(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), path) from None


def _type_error(message: str, path: str) -> RequestError:
    """Turn msgspec's `Expected ... - at $.a[0]` into a message that names the field."""
    found = _PATH.match(message)
    if found:
        message, path = found["what"], _join(path, found["path"].lstrip("."))
    if field := _FIELD.search(message):
        param = _join(path, field["name"][:64])
        unknown = field["what"] == "unknown"
        text = f"Unknown field '{param}'." if unknown else f"'{param}' is required."
        code = "unknown_field" if unknown else "missing_field"
        return RequestError(text, param=param, code=code)
    message = message[:1].lower() + message[1:].replace("`", "")
    where = f"'{path}': " if path else ""
    return RequestError(f"{where}{message}.", param=path or None, code="invalid_type")


def _join(path: str, name: str) -> str:
    if not path or not name:
        return path or name
    return path + name if name.startswith("[") else f"{path}.{name}"
