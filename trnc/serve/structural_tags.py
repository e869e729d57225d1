"""Structural tags of xgrammar: formats, as JSON, of which a grammar can be put together."""

from __future__ import annotations

import json
from typing import Any

from trnc.engine.messages import MAX_WHITESPACE, Grammar
from trnc.errors import RequestError

Element = dict[str, Any]


def json_element(schema: Any) -> Element:
    """Return the format of JSON that keeps to a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def any_of(elements: list[Element]) -> Element:
    """Return the format of a text that has one of the formats."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def tag_grammar(element: Element) -> Grammar:
    """Return the grammar of a text that has this format as a whole."""
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": element}))


def element_of(grammar: Grammar, param: str) -> Element:
    """Return the format of a text in a grammar, which is of the field `param`.

    Raises:
        RequestError: it is a structural tag of the older kind, which cannot be a part of another.
    """
    match grammar.kind:
        case "json":
            return json_element({"type": "object", "additionalProperties": True})
        case "json_schema":
            return json_element(json.loads(grammar.source))
        case "regex":
            return {"type": "regex", "pattern": grammar.source}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
    try:
        tag = json.loads(grammar.source)
    except (ValueError, RecursionError):
        tag = None
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        return dict(tag["format"])
    raise RequestError(
        f"'{param}' must be a structural tag with a 'format' where tools may be called.",
        param=param,
    )
