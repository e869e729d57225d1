"""The canonical text of a stage graph: its grammar and its parser.

    trnc-graph 1
    # torch 2.13.0
    input $0: f32[4, 576]
    input $1: f32[576]
    %0: f32[4, 576] = trnc.rms_norm.default($0, $1, 1e-05)
    output %0

`trnc.compiler.canonical` writes it, `trnc.equiv` reads it back; the words that both need are here.
The text is all that this package knows of a graph: it never sees torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trnc.errors import TrncError

FORMAT = "trnc-graph 1"
TORCH_PREFIX = "# torch "

_OPERAND = re.compile(r'"(?:[^"\\]|\\.)*"|([$%]\d+)')
_INPUT = re.compile(r"input (\$\d+): (.+)")
_NODE = re.compile(r"(%\d+): (.+?) = (.+)")
_OUTPUT = re.compile(r"output (.+)")
_RANGE = re.compile(r"range (.+)")


@dataclass(frozen=True, slots=True)
class Expression:
    """Text with operands in it: `pieces[0] operands[0] pieces[1] ... pieces[-1]`."""

    pieces: tuple[str, ...]
    operands: tuple[str, ...]

    def render(self, names: Mapping[str, str]) -> str:
        """Return the text with each operand renamed by `names` (kept where it has no entry)."""
        words = [names.get(o, o) for o in self.operands]
        return self.pieces[0] + "".join(w + p for w, p in zip(words, self.pieces[1:], strict=True))

    @property
    def op(self) -> str:
        """The name of the op, e.g. `aten.add.Tensor`; empty for an output."""
        return self.pieces[0].split("(", 1)[0]


@dataclass(frozen=True, slots=True)
class Value:
    """One line that defines a value. An input has no expression. `line` counts from 1."""

    name: str
    type: str
    expression: Expression | None
    line: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A parsed canonical text."""

    torch: str
    inputs: tuple[Value, ...]
    ranges: tuple[str, ...]
    nodes: tuple[Value, ...]
    outputs: tuple[Expression, ...]


def parse_expression(text: str) -> Expression:
    """Split `text` at its operands (`$0`, `%12`); quoted strings hold none."""
    pieces, operands, start = [], [], 0
    for match in _OPERAND.finditer(text):
        if match[1]:
            pieces.append(text[start : match.start()])
            operands.append(match[1])
            start = match.end()
    return Expression((*pieces, text[start:]), tuple(operands))


def parse(text: str) -> Graph:
    """Parse a canonical text.

    Raises:
        TrncError: a line that is not of the grammar, or another format version.
    """
    lines = text.splitlines()
    if not lines or lines[0] != FORMAT:
        found = lines[0] if lines else "an empty text"
        raise TrncError(
            f"expected a graph of format '{FORMAT}', found '{found[:60]}':"
            " write the lock again with tools/graph_equiv.py accept"
        )
    torch, inputs, ranges, nodes, outputs = "", [], [], [], []
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith(TORCH_PREFIX):
            torch = line.removeprefix(TORCH_PREFIX)
        elif match := _INPUT.fullmatch(line):
            inputs.append(Value(match[1], match[2], None, number))
        elif match := _RANGE.fullmatch(line):
            ranges.append(match[1])
        elif match := _NODE.fullmatch(line):
            nodes.append(Value(match[1], match[2], parse_expression(match[3]), number))
        elif match := _OUTPUT.fullmatch(line):
            outputs.append(parse_expression(match[1]))
        else:
            raise TrncError(f"line {number} of a graph is not canonical text: '{line[:80]}'")
    return Graph(torch, tuple(inputs), tuple(ranges), tuple(nodes), tuple(outputs))
