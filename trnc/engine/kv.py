"""The KV pages of the running requests: the page pool and the prefix tree, taken together.

A request is admitted with pages for every token that it has, so prefill never waits for a page;
then `grow` gives it more when it decodes past the end of its last page. `absorb` hands each
full page over to the tree as soon as the step that filled it has ended, so that a request that
comes later, and this one when it comes back after a preemption, finds it there.

A page given back may still be read or written by steps that were submitted before. That is safe:
only a later plan can hand it out again, and steps run in the order in which they were submitted.
"""

from __future__ import annotations

from trnc.engine.pages import PagePool
from trnc.engine.radix import PrefixTree
from trnc.engine.request import Request


class KvCache:
    """Who holds which page. Every page but page 0 is in the pool, in the tree, or a request's."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages=num_pages)
        self.tree = PrefixTree(page_size=page_size)
        self._page_size = page_size

    @property
    def available(self) -> int:
        """How many pages can be had at once, the tree's unlocked ones included."""
        return len(self.pool) + self.tree.evictable

    def admit(self, request: Request, *, headroom: int) -> bool:
        """Give a request the pages of all its tokens; False if `headroom` would not be left.

        Pages found in the tree count as computed, but never the last token's: its step yields
        the logits of the next one. The same goes for tokens of the prompt that are to be scored.
        """
        tokens = len(request.token_ids)
        scored = request.score_next < request.prompt_tokens
        max_pages = ((request.score_next if scored else tokens) - 1) // self._page_size
        node = self.tree.match(request.token_ids, max_pages=max_pages)
        self.tree.lock(node)
        need = -(-tokens // self._page_size) - node.depth
        if self.available < need + headroom:
            self.tree.unlock(node)
            return False
        request.node = node
        request.pages = self.tree.pages(node) + [self._take() for _ in range(need)]
        request.scheduled = request.computed = node.depth * self._page_size
        return True

    def grow(self, request: Request, end: int) -> bool:
        """Make sure that positions `0 .. end - 1` have pages; False if too few can be had."""
        need = -(-end // self._page_size) - len(request.pages)
        if need > self.available:
            return False
        request.pages += [self._take() for _ in range(need)]
        return True

    def absorb(self, request: Request) -> None:
        """Move the pages that `request.computed` has filled from the request to the tree."""
        assert request.node is not None, "only a request that holds pages can fill them"
        while (request.node.depth + 1) * self._page_size <= request.computed:
            index = request.node.depth
            start = index * self._page_size
            key = tuple(request.token_ids[start : start + self._page_size])
            own = request.pages[index]
            request.node = self.tree.insert(request.node, key, own)
            if request.node.page != own:
                request.pages[index] = request.node.page
                request.table = ()
                self.pool.give_back(own)

    def release(self, request: Request) -> None:
        """Take everything back from a request; what the tree has of it stays there, unlocked."""
        assert request.node is not None, "released twice"
        for page in reversed(request.pages[request.node.depth :]):
            self.pool.give_back(page)
        self.tree.unlock(request.node)
        request.node = None
        request.pages = []
        request.table = ()
        request.scheduled = request.computed = 0

    def flush(self) -> int:
        """Forget the contents of every page of the tree; return how many there were.

        No request may hold pages. Steps in flight may still write some: see the module.
        """
        pages = 0
        while (page := self.tree.evict()) is not None:
            self.pool.give_back(page)
            pages += 1
        assert not len(self.tree), "only the tree's pages that a request stands on are not evicted"
        return pages

    def _take(self) -> int:
        if not len(self.pool):
            page = self.tree.evict()
            assert page is not None, "the caller looked at `available` first"
            self.pool.give_back(page)
        return self.pool.take()
