"""KV pages and the prefix tree: sharing, eviction order, and that no page is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.driver import submit
from tests.scripted_executor import small_info
from trnc.engine.kv import KvCache
from trnc.engine.pages import PagePool
from trnc.engine.radix import PrefixTree
from trnc.engine.request import Request, new_request

PAGE = 2


def request_of(*tokens: int) -> Request:
    return new_request(submit("r", tokens), small_info(page_size=PAGE))


def fill(kv: KvCache, request: Request) -> None:
    """Pretend that steps computed all that the request has."""
    request.scheduled = request.computed = len(request.token_ids)
    kv.absorb(request)


def cached(kv: KvCache, *tokens: int) -> int:
    """How many tokens a new request with this prompt would find."""
    return kv.tree.match(tokens, max_pages=(len(tokens) - 1) // PAGE).depth * PAGE


def leave(kv: KvCache, *tokens: int) -> None:
    """Run a prompt from start to end."""
    request = request_of(*tokens)
    assert kv.admit(request, headroom=0)
    fill(kv, request)
    kv.release(request)


def test_pool_never_hands_out_page_zero_and_refuses_a_double_free() -> None:
    pool = PagePool(num_pages=4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.take()
    pool.give_back(2)
    for page in (2, 0):
        with pytest.raises(ValueError, match="not taken"):
            pool.give_back(page)


def test_a_hit_ends_at_the_first_page_that_differs() -> None:
    kv = KvCache(num_pages=20, page_size=PAGE)
    leave(kv, 1, 2, 3, 4, 5, 6)
    assert cached(kv, 1, 2, 3, 4, 9, 9, 9) == 4
    assert cached(kv, 1, 2, 9, 4, 5, 6, 7) == 2
    assert cached(kv, 3, 4, 5) == 0  # the same tokens, but not behind the same history


def test_a_hit_never_covers_the_whole_prompt() -> None:
    kv = KvCache(num_pages=20, page_size=PAGE)
    leave(kv, 1, 2, 3, 4)
    for tokens, hit in (((1, 2, 3, 4), 2), ((1, 2, 3, 4, 5), 4), ((1, 2), 0)):
        request = request_of(*tokens)
        assert kv.admit(request, headroom=0)
        assert request.computed == hit
        kv.release(request)


def test_a_running_request_shares_its_full_pages_at_once() -> None:
    kv = KvCache(num_pages=20, page_size=PAGE)
    first, second = request_of(1, 2, 3, 4, 5), request_of(1, 2, 3, 4, 6)
    assert kv.admit(first, headroom=0)
    fill(kv, first)
    assert kv.admit(second, headroom=0)
    assert second.computed == 4
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_two_requests_that_computed_the_same_page_keep_one() -> None:
    kv = KvCache(num_pages=20, page_size=PAGE)
    first, second = request_of(1, 2, 3), request_of(1, 2, 4)
    assert kv.admit(first, headroom=0)
    assert kv.admit(second, headroom=0)
    assert first.pages[0] != second.pages[0]
    before = len(kv.pool)
    fill(kv, first)
    fill(kv, second)
    assert first.pages[0] == second.pages[0]
    assert len(kv.pool) == before + 1


def test_admission_leaves_the_headroom_or_takes_nothing() -> None:
    kv = KvCache(num_pages=5, page_size=PAGE)
    request = request_of(1, 2, 3, 4, 5)
    assert not kv.admit(request, headroom=2)
    assert (len(kv.pool), request.pages) == (4, [])
    assert kv.admit(request, headroom=1)


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    kv = KvCache(num_pages=7, page_size=PAGE)
    leave(kv, 1, 2, 3, 4)
    leave(kv, 5, 6)
    leave(kv, 7, 8)
    leave(kv, 5, 6, 0)  # used again: now younger than (7, 8)
    leave(kv, *range(20, 29))  # five pages, so that both of (1, 2, 3, 4) and (7, 8) go
    assert [cached(kv, *prompt, 0) for prompt in ((1, 2, 3, 4), (5, 6), (7, 8))] == [0, 2, 0]


def test_eviction_takes_leaves_before_their_parents_and_spares_locked_paths() -> None:
    tree = PrefixTree(page_size=1)
    tree.lock(tree.root)
    a = tree.insert(tree.root, (1,), 11)
    b = tree.insert(a, (2,), 12)
    tree.lock(a)
    tree.unlock(b)
    assert (tree.evictable, tree.evict(), tree.evict()) == (1, 12, None)
    tree.unlock(a)
    assert (tree.evictable, tree.evict(), tree.evict(), len(tree)) == (1, 11, None, 0)


class KvMachine(RuleBasedStateMachine):
    """Admits, grows, fills and releases requests over an alphabet that makes prefixes collide."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(num_pages=12, page_size=PAGE)
        self.running: list[Request] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), headroom=st.integers(0, 2))
    def admit(self, tokens: list[int], headroom: int) -> None:
        request = request_of(*tokens)
        available = self.kv.available
        if self.kv.admit(request, headroom=headroom):
            assert request.computed < len(tokens)
            for page in range(request.computed // PAGE):
                history = tuple(tokens[: (page + 1) * PAGE])
                assert self.contents[request.pages[page]] == history, "a hit on another history"
            assert self.kv.available >= headroom
            self.running.append(request)
        else:
            assert self.kv.available == available

    @precondition(lambda self: self.running)
    @rule(data=st.data(), steps=st.integers(1, 5), token=st.integers(0, 1))
    def run(self, data: st.DataObject, steps: int, token: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        for _ in range(steps):
            if not self.kv.grow(request, request.scheduled + 1):
                assert self.kv.available == 0
                return
            page = request.pages[request.scheduled // PAGE]
            assert page not in {node.page for node in self.kv.tree.nodes()}, "a shared page written"
            if request.scheduled == len(request.token_ids):
                request.token_ids.append(token)
            request.scheduled += 1
            request.computed = request.scheduled
            self.contents[page] = tuple(request.token_ids[: request.computed])
            self.kv.absorb(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.release(request)

    @invariant()
    def each_page_has_one_owner(self) -> None:
        owned = list(self.kv.pool.free_pages()) + [node.page for node in self.kv.tree.nodes()]
        for request in self.running:
            assert request.node is not None
            owned += request.pages[request.node.depth :]
            assert request.pages[: request.node.depth] == self.kv.tree.pages(request.node)
        assert sorted(owned) == list(range(1, 12))

    @invariant()
    def full_pages_are_shared(self) -> None:
        for request in self.running:
            assert request.node is not None
            assert request.node.depth == request.computed // PAGE

    @invariant()
    def what_is_available_can_be_had(self) -> None:
        locked = sum(node.locks > 0 for node in self.kv.tree.nodes())
        assert self.kv.tree.evictable == len(self.kv.tree) - locked

    def teardown(self) -> None:
        for request in self.running:
            self.kv.release(request)
        evicted = [self.kv.tree.evict() for _ in range(len(self.kv.tree))]
        assert None not in evicted
        assert len(self.kv.tree) == 0


KvMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestKvMachine = KvMachine.TestCase
