"""An op-level diff of two canonical texts that a reviewer can read.

The texts number values by position, so one inserted op renumbers everything below it. Here values
are first aligned by what they compute, then both sides are printed with the names of the old one
(`%n0`, `$n0`, ... for values that are new), so that only what really changed differs:

1. Inputs are aligned in order, by type.
2. A value computed the same way on both sides (equal as trees) is the same value.
3. The rest is aligned in order by score: same op, same constants, same type, and in a second pass
   operands that are already aligned. A pair may differ; that is shown as `-` and `+`.

The diff is empty exactly when the texts are equal: with no line changed, the alignment is an
isomorphism, and isomorphic graphs have one canonical text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Literal

from trnc.equiv.text import TORCH_PREFIX, Graph, Value, parse

CONTEXT = 2  # unchanged lines shown around a change


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a diff: unchanged, removed or added. `source` is `file:line`, where known."""

    tag: Literal[" ", "-", "+"]
    text: str
    source: str | None = None


def diff_texts(
    before: str, after: str, sources: Mapping[int, str] | None = None
) -> tuple[DiffLine, ...]:
    """Diff two canonical texts; `sources` maps line numbers of `after` to `file:line`.

    Raises:
        TrncError: a text cannot be parsed.
    """
    old, new = parse(before), parse(after)
    names = _align(old, new)
    notes = sources or {}
    header = _diff_words([_torch_line(old), *_ranges(old)], [_torch_line(new), *_ranges(new)])
    inputs = _diff_values(old.inputs, new.inputs, names, notes)
    nodes = _diff_values(old.nodes, new.nodes, names, notes)
    outputs = _diff_words(
        [f"output {o.render({})}" for o in old.outputs],
        [f"output {o.render(names)}" for o in new.outputs],
    )
    return (*header, *inputs, *nodes, *outputs)


def changed(lines: Sequence[DiffLine]) -> tuple[DiffLine, ...]:
    """Return only the lines that were removed or added."""
    return tuple(line for line in lines if line.tag != " ")


def format_lines(lines: Sequence[DiffLine]) -> str:
    """Print the changes with CONTEXT unchanged lines around each and `...` for the others."""
    near = {
        j
        for i, line in enumerate(lines)
        if line.tag != " "
        for j in range(i - CONTEXT, i + CONTEXT + 1)
    }
    shown: list[str] = []
    for i, line in enumerate(lines):
        if i in near:
            note = f"    # {line.source}" if line.source and line.tag != " " else ""
            shown.append(f"{line.tag} {line.text}{note}")
        elif not shown or shown[-1] != "  ...":
            shown.append("  ...")
    return "\n".join(shown)


# Alignment


def _align(old: Graph, new: Graph) -> dict[str, str]:
    """Return a name for each value of `new`: its partner's in `old`, or one of its own."""
    pairs = _best_pairs(old.inputs, new.inputs, _input_score)
    names = {b.name: a.name for a, b in pairs}
    _name_rest(new.inputs, names, "$n")
    known: dict[tuple[str, str], str] = {}
    for value in old.nodes:
        known[value.type, _right(value, {})] = value.name
    for value in new.nodes:  # operands come first, so an equal line is an equal tree
        if all(o in names for o in _operands(value)) and (
            partner := known.get((value.type, _right(value, names)))
        ):
            names[value.name] = partner
    taken = set(names.values())
    old_rest = [v for v in old.nodes if v.name not in taken]
    new_rest = [v for v in new.nodes if v.name not in names]
    aligned: dict[str, str] = {}
    for _ in range(2):  # the second pass knows which operands the first has aligned
        score = partial(_score, names={**names, **aligned})
        best = _best_pairs(old_rest, new_rest, score)
        aligned = {b.name: a.name for a, b in best}
    names |= aligned
    _name_rest(new.nodes, names, "%n")
    return names


def _name_rest(values: Sequence[Value], names: dict[str, str], prefix: str) -> None:
    rest = [v.name for v in values if v.name not in names]
    names |= {name: f"{prefix}{i}" for i, name in enumerate(rest)}


def _right(value: Value, names: Mapping[str, str]) -> str:
    return value.expression.render(names) if value.expression else ""


def _operands(value: Value) -> tuple[str, ...]:
    return value.expression.operands if value.expression else ()


def _input_score(a: Value, b: Value) -> float:
    if a.type == b.type:
        return 3.0
    return 1.0 if a.type.partition("[")[0] == b.type.partition("[")[0] else 0.0


def _score(a: Value, b: Value, names: Mapping[str, str]) -> float:
    """How alike two ops are; 0 means that they must not be paired."""
    assert a.expression is not None
    assert b.expression is not None
    mapped = [names.get(o) for o in b.expression.operands]
    wired = sum(x == y for x, y in zip(a.expression.operands, mapped, strict=False))
    share = wired / max(1, len(mapped), len(a.expression.operands))
    if a.expression.op != b.expression.op:
        return 0.5 * share if a.type == b.type else 0.0
    return 1.0 + 2.0 * (a.expression.pieces == b.expression.pieces) + (a.type == b.type) + 2 * share


def _best_pairs(
    old: Sequence[Value], new: Sequence[Value], score: Callable[[Value, Value], float]
) -> list[tuple[Value, Value]]:
    """Pair values in order so that the sum of scores is largest (Needleman-Wunsch, no gap cost)."""
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    scores = [[score(a, b) for b in new] for a in old]
    for i in range(len(old) - 1, -1, -1):
        for j in range(len(new) - 1, -1, -1):
            pair = best[i + 1][j + 1] + scores[i][j]
            best[i][j] = max(pair, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        if scores[i][j] and best[i][j] == best[i + 1][j + 1] + scores[i][j]:
            pairs.append((old[i], new[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


# Lines


def _diff_values(
    old: Sequence[Value],
    new: Sequence[Value],
    names: Mapping[str, str],
    sources: Mapping[int, str],
) -> list[DiffLine]:
    """Lines in the new order; a removed value comes after the line that it followed."""
    partners = {v.name: v for v in old}
    gone: dict[str | None, list[Value]] = {}
    anchor, kept = None, set(names.values())
    for value in old:
        if value.name in kept:
            anchor = value.name
        else:
            gone.setdefault(anchor, []).append(value)
    lines = [DiffLine("-", _line(v, {})) for v in gone.get(None, [])]
    for value in new:
        name, source = names[value.name], sources.get(value.line)
        text = _line(value, names)
        partner = partners.get(name)
        if partner is not None and _line(partner, {}) == text:
            lines.append(DiffLine(" ", text, source))
        else:
            lines += [DiffLine("-", _line(partner, {}))] if partner else []
            lines.append(DiffLine("+", text, source))
        lines += [DiffLine("-", _line(v, {})) for v in gone.get(name, [])]
    return lines


def _line(value: Value, names: Mapping[str, str]) -> str:
    name = names.get(value.name, value.name)
    if value.expression is None:
        return f"input {name}: {value.type}"
    return f"{name}: {value.type} = {value.expression.render(names)}"


def _diff_words(old: Sequence[str], new: Sequence[str]) -> list[DiffLine]:
    lines: list[DiffLine] = []
    for tag, a, a_end, b, b_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [DiffLine(" ", text) for text in old[a:a_end]]
        else:
            lines += [DiffLine("-", text) for text in old[a:a_end]]
            lines += [DiffLine("+", text) for text in new[b:b_end]]
    return lines


def _torch_line(graph: Graph) -> str:
    return TORCH_PREFIX + graph.torch


def _ranges(graph: Graph) -> list[str]:
    return [f"range {r}" for r in graph.ranges]
