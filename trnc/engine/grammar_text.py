r"""What xgrammar 0.2.9 gets wrong in the text of its grammars, and how that is mended.

It compiles a grammar from its text. There it prints the letter U+00DF as `\xdf`, and reads every
hexadecimal digit that follows as one more digit of it: `\xdfe` would be another letter, and an
answer with the name "größe" would be refused. So such a letter is kept apart from digits. And
`[\^a]` is printed as `[^a]`: what that was cannot be told any more, so it is refused.
"""

from __future__ import annotations

import re

# Patterns of a grammar's text, each with what it should be.
Faults = tuple[tuple[str, str], ...]

# Strings of limited length may have control characters, which no JSON parser takes, and all strings
# may have halves of surrogate pairs, which are no UTF-8.
JSON_STRINGS = ((r'\[\^(\\0-\\x1f)?\\"\\\\\\r\\n\]', r"[^\0-\x1f\"\\\ud800-\udfff]"),)
# Where arguments are not JSON but GLM's markup, so may the markup that ends them and white space
# around it, which a reader cannot tell from the string's own.
GLM_STRINGS = (
    (re.escape(r"[\0-\U0010ffff]"), r"[^<\ud800-\udfff]"),
    (r'"<arg_value>" whitespace\w*\{0, \d+\} ', '"<arg_value>" '),
    (r' whitespace\w*\{0, \d+\} "</arg_value>"', ' "</arg_value>"'),
)

_CHARACTER = r"(?:\\x[\da-f]{2}|\\u[\da-f]{4}|\\U[\da-f]{8}|\\.|[^\\])"
_STRING = rf'"(?:(?!"){_CHARACTER})*"'
_CLASS = rf"\[\^?(?:(?!\]){_CHARACTER})*\]"
_ELEMENT = rf"(?!\]){_CHARACTER}(?:-{_CHARACTER})?"
_OPEN_END = re.compile(r"\\x[\da-f]{2}$")
_DIGIT = re.compile(r"[\da-fA-F]")


def check_source(source: str) -> None:
    """Raise ValueError where a regular expression, alone or in a schema, would be misread."""
    if re.search(r"(?<!\\)\[\\{1,2}\^", source):
        raise ValueError(r"a character class cannot begin with \^ here: put the \^ at its end")


def mend(text: str, faults: Faults) -> str:
    """Return the text of the grammar that was meant."""
    for loose, tight in faults:
        text = re.sub(loose, tight.replace("\\", r"\\"), text)
    return re.sub(f"{_STRING}|{_CLASS}", lambda part: _apart(part[0]), text)


def _apart(part: str) -> str:
    if not re.search(r"\\x[\da-f]{2}[\da-fA-F]", part):
        return part
    if part[0] == '"':
        return re.sub(
            rf"({_CHARACTER})(?=(.))",
            lambda at: at[1] + '" "' * bool(_OPEN_END.match(at[1]) and _DIGIT.match(at[2])),
            part,
        )
    head = "[^" if part.startswith("[^") else "["
    return head + "".join(_ordered(re.findall(_ELEMENT, part[len(head) :]))) + "]"


def _ordered(elements: list[str]) -> list[str]:
    """Put the elements of a class that begin with a digit before those that end in an escape."""
    digits = [element for element in elements if _DIGIT.match(element)]
    wide = [element for element in digits if _OPEN_END.search(element)]
    if wide:  # they reach from a digit beyond ASCII, all of them: so they overlap
        wide = [f"{min(wide)[0]}-{max(element[-4:] for element in wide)}"]
    closed = [element for element in digits if not _OPEN_END.search(element)]
    return closed + wide + [element for element in elements if not _DIGIT.match(element)]
