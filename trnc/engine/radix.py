"""The prefix tree: full KV pages that can be shared, by the tokens that they hold.

A node is one page; the path from the root spells the tokens of a sequence from position 0, so a
page is found only behind the same history, which is all that its contents depend on. Requests
lock the path that they stand on. Unlocked leaves are evicted, the least recently used first, by a
logical clock: the same calls in the same order always evict the same pages.

Invariants:
- `node.locks` is how many requests stand on the node or below it, so a locked node has only
  locked ancestors, and every node that is not locked can be evicted, leaves first.
- A node's page is never written: the request that filled it handed it over when it was full.
- A node is in the eviction queue at most once, with a time not later than its `last_used`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PageKey = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One full page. `depth` is how many pages the path to it has, itself included."""

    page: int
    depth: int
    key: PageKey = ()
    parent: Node | None = None
    children: dict[PageKey, Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0
    queued: bool = False


class PrefixTree:
    """A radix tree whose edges are pages of `page_size` tokens."""

    def __init__(self, *, page_size: int) -> None:
        self.root = Node(page=0, depth=0)
        self._page_size = page_size
        self._size = 0
        self._locked = 0
        self._clock = 0
        self._pushes = 0
        self._queue: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        """How many pages the tree holds."""
        return self._size

    @property
    def evictable(self) -> int:
        """How many pages `evict` can return before it is at its end."""
        return self._size - self._locked

    def match(self, token_ids: Sequence[int], *, max_pages: int) -> Node:
        """Return the deepest node whose path spells a prefix of `token_ids`, or the root."""
        node = self.root
        while node.depth < max_pages:
            start = node.depth * self._page_size
            child = node.children.get(tuple(token_ids[start : start + self._page_size]))
            if child is None:
                break
            node = child
        return node

    def insert(self, node: Node, key: PageKey, page: int) -> Node:
        """Move the caller's lock from `node` to its child for `key`, and return the child.

        `page` becomes the tree's if there is no such child yet. Otherwise `child.page` holds the
        same contents already, and `page` stays the caller's, who should go over to the other.
        """
        child = node.children.get(key)
        if child is None:
            child = Node(page=page, depth=node.depth + 1, key=key, parent=node)
            node.children[key] = child
            self._size += 1
        self._locked += child.locks == 0
        child.locks += 1
        return child

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from being evicted until `unlock(node)`."""
        for step in self._path(node):
            self._locked += step.locks == 0
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)` (or the `insert` that returned it); the path counts as used now."""
        self._clock += 1
        for step in self._path(node):
            step.locks -= 1
            step.last_used = self._clock
            self._locked -= step.locks == 0
        self._enqueue(node)

    def evict(self) -> int | None:
        """Drop the least recently used leaf that is not locked; return its page, or None."""
        while self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if last_used < node.last_used:
                self._enqueue(node)
            elif node.locks == 0 and not node.children:
                self._remove(node)
                return node.page
        return None

    def pages(self, node: Node) -> list[int]:
        """Return the pages of the path to `node`, first page first."""
        return [step.page for step in self._path(node)][::-1]

    def nodes(self) -> Iterator[Node]:
        """Yield every node except the root (for checks)."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _enqueue(self, node: Node) -> None:
        if node.parent is None or node.queued or node.locks or node.children:
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._queue, (node.last_used, self._pushes, node))

    def _remove(self, node: Node) -> None:
        assert node.parent is not None, "the root is never queued"
        del node.parent.children[node.key]
        self._size -= 1
        self._enqueue(node.parent)
