"""A lock's difference as one self-contained HTML page: variants, stages, graphs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from trnc.equiv.diff import DiffLine, diff_texts
from trnc.equiv.lock import LockDiff, PresetChange, StageChange
from trnc.equiv.report import call_word, list_variants

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --old: #f8514926; --new: #3fb95026; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top }
code, .graph td { font: 12.5px/1.45 ui-monospace, monospace }
.graph { table-layout: fixed } .graph td { white-space: pre-wrap; overflow-wrap: anywhere }
.old { background: var(--old) } .new { background: var(--new) }
.source { opacity: .65 } .skip td { text-align: center; opacity: .6 }
summary { cursor: pointer; padding: .3rem 0 }
.names span { display: inline-block; margin-right: .9rem; font-size: 12.5px; white-space: nowrap }
"""
_CONTEXT = 3  # unchanged rows around a change; the others fold away


def html_page(diff: LockDiff, title: str) -> str:
    """Return the page. It loads nothing: no script, font or picture from elsewhere."""
    body = [f"<h1>Graphs: {escape(title)}</h1>"]
    if not diff:
        body.append("<p>Graphs unchanged.</p>")
    body += [_preset(preset) for preset in diff.presets]
    if diff.stages:
        body.append(_stage_list(diff.stages))
    body += [_stage(number, change) for number, change in enumerate(diff.stages)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Graphs: {escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _preset(preset: PresetChange) -> str:
    """The variant matrix: which stage took which one's place, and in which variants."""
    if preset.state != "changed":
        text = f"{preset.state}, {preset.total} variants"
        return f"<h2>{escape(preset.name)}</h2><p>{text}</p>"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in preset.added:
        groups.setdefault(("", "new variant", "new"), []).append(name)
    for name in preset.removed:
        groups.setdefault(("variant gone", "", "old"), []).append(name)
    for variant in preset.changed:
        for old, new in variant.calls:
            key = (call_word(old), call_word(new), "")
            groups.setdefault(key, []).append(variant.name)
        if variant.has_new_wiring:
            groups.setdefault(("", "values bound to other inputs", ""), []).append(variant.name)
    cells = "".join(
        f'<tr class="{kind}"><td><code>{escape(old)}</code></td><td><code>{escape(new)}</code></td>'
        f'<td class="names">{"".join(f"<span>{escape(n)}</span>" for n in names)}</td></tr>'
        for (old, new, kind), names in groups.items()
    )
    heading = f"{preset.name}: {len(preset.changed)} of {preset.total} variants changed"
    return (
        f"<details open><summary><b>{escape(heading)}</b></summary><table>"
        f"<tr><th>before</th><th>after</th><th>variants</th></tr>{cells}</table></details>"
    )


def _stage_list(changes: Sequence[StageChange]) -> str:
    rows = []
    for number, change in enumerate(changes):
        before, after = (s.label if s else "(none)" for s in (change.before, change.after))
        rows.append(
            f'<tr><td><a href="#stage{number}"><code>{escape(before)}</code></a></td>'
            f"<td><code>{escape(after)}</code></td>"
            f"<td>{escape(list_variants(change.variants))}</td></tr>"
        )
    head = "<tr><th>before</th><th>after</th><th>in</th></tr>"
    return f"<h2>Stages</h2><table>{head}{''.join(rows)}</table>"


def _stage(number: int, change: StageChange) -> str:
    before, after = change.before, change.after
    if before is not None and after is not None:
        lines: Sequence[DiffLine] = diff_texts(before.text, after.text, after.sources)
    elif after is not None:
        lines = [DiffLine("+", text) for text in after.text.splitlines()]
    else:
        assert before is not None
        lines = [DiffLine("-", text) for text in before.text.splitlines()]
    names = " → ".join(stage.label if stage else "(none)" for stage in (before, after))
    return (
        f'<h2 id="stage{number}"><code>{escape(names)}</code></h2>'
        f'<table class="graph"><tr><th>before</th><th>after</th></tr>'
        f"{''.join(_rows(lines))}</table>"
    )


def _rows(lines: Sequence[DiffLine]) -> Iterator[str]:
    """Old lines on the left, new ones on the right; unchanged rows far from changes fold away."""
    pairs = list(_side_by_side(lines))
    changed = [i for i, (old, new) in enumerate(pairs) if old is not new]
    near = {j for i in changed for j in range(i - _CONTEXT, i + _CONTEXT + 1)}
    for is_shown, group in groupby(range(len(pairs)), key=near.__contains__):
        indexes = list(group)
        if not is_shown:
            noun = "line" if len(indexes) == 1 else "lines"
            text = f"{len(indexes)} unchanged {noun}"
            yield f'<tr class="skip"><td colspan="2">{text}</td></tr>'
        else:
            yield from (_row(*pairs[i]) for i in indexes)


def _side_by_side(lines: Sequence[DiffLine]) -> Iterator[tuple[DiffLine | None, DiffLine | None]]:
    """Pair removed lines with the added ones that follow them; an unchanged line with itself."""
    waiting: list[DiffLine] = []
    for line in lines:
        if line.tag == "-":
            waiting.append(line)
        elif line.tag == "+":
            yield (waiting.pop(0) if waiting else None), line
        else:
            yield from ((old, None) for old in waiting)
            waiting = []
            yield line, line
    yield from ((old, None) for old in waiting)


def _row(old: DiffLine | None, new: DiffLine | None) -> str:
    is_changed = old is not new
    return f"<tr>{_cell(old, 'old', is_changed)}{_cell(new, 'new', is_changed)}</tr>"


def _cell(line: DiffLine | None, side: str, is_changed: bool) -> str:
    if line is None:
        return "<td></td>"
    source = f' <span class="source"># {escape(line.source)}</span>' if line.source else ""
    note = source if side == "new" else ""
    kind = f' class="{side}"' if is_changed else ""
    return f"<td{kind}>{escape(line.text)}{note}</td>"
