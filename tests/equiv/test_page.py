"""The page: what changed, side by side, and nothing loaded from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser

from tests.equiv.test_lock import preset, variants
from trnc.equiv.lock import compare
from trnc.equiv.page import html_page


class Page(HTMLParser):
    """The texts of table rows, cell by cell, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        href = found.get("href") or ""
        self.links.add(href)
        if "src" in found or tag in ("script", "link") or (href and not href.startswith("#")):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def page(sources: dict[int, str] | None = None) -> Page:
    before, after = variants(), variants("tanh")
    del after["decode-1/greedy"]
    diff = compare([preset(before)], [preset(after, sources=sources)])
    return Page(html_page(diff, "a <b> → c"))


def test_it_loads_nothing_and_its_links_lead_somewhere() -> None:
    shown = page()
    assert shown.loads == []
    assert {link.removeprefix("#") for link in shown.links if link} <= shown.ids


def test_ops_are_side_by_side_with_their_source() -> None:
    rows = page({4: "trnc/models/<llama>.py:7"}).rows
    assert [
        "%0: f32[4, 8] = aten.relu.default($0)",
        "%0: f32[4, 8] = aten.tanh.default($0) # trnc/models/<llama>.py:7",
    ] in rows
    neg = "%1: f32[4, 8] = aten.neg.default(%0)"
    assert [neg, neg] in rows
    assert ["variant gone", "", "decode-1/greedy"] in rows
    assert any("decode-4/greedy" in row[-1] for row in rows if row)


def test_titles_are_escaped_and_no_change_is_said() -> None:
    text = html_page(compare([preset(variants())], [preset(variants())]), "a <b>")
    assert "a &lt;b&gt;" in text
    assert "Graphs unchanged." in text
