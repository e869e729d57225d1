"""The pool of KV pages: which page numbers are free.

A page has exactly one owner at any time: this pool, the prefix tree (`radix.py`), or one running
request. Sharing is counted on the tree's nodes and not here, so a page that can be written (one
that a request owns) is never shared. Page 0 is nobody's: padding rows write there.
"""

from __future__ import annotations


class PagePool:
    """Hands out page numbers `1 .. num_pages - 1`; the page freed last goes first."""

    def __init__(self, *, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = [page != 0 for page in range(num_pages)]

    def __len__(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self) -> int:
        """Return a free page; raises IndexError if there is none."""
        page = self._free.pop()
        self._is_free[page] = False
        return page

    def give_back(self, page: int) -> None:
        """Make a page free again; raises ValueError if it is page 0 or free already."""
        if page == 0 or self._is_free[page]:
            raise ValueError(f"KV page {page} is given back but was not taken")
        self._is_free[page] = True
        self._free.append(page)

    def free_pages(self) -> frozenset[int]:
        """Return the free page numbers (for checks)."""
        return frozenset(self._free)
