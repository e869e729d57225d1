"""Grammars: compiled by xgrammar in a process of their own, matched in the engine.

A schema is a program from a stranger. Its compilation runs in a worker process that may use so
much time and memory and no more; when a limit stops it, the request is refused, the worker is
replaced, and the engine has not noticed. What was compiled comes back as text and is kept by
content. A thread of the engine's process speaks with the worker, so the engine never waits for it.

xgrammar is an extra of the package and slow to import: only this module and the worker do so, late.
"""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from trnc.checkpoint.source import resolve
from trnc.checkpoint.tokenizer import Tokenizer, load_tokenizer
from trnc.engine import grammar_worker as worker
from trnc.engine.grammar_worker import COMPILE_MIB, COMPILE_SECONDS, LoadTokenizer
from trnc.engine.messages import Grammar, Submit
from trnc.engine.rules import Matcher, Words
from trnc.errors import RequestError

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20  # of compiled grammars; one alone may take an eighth

Outcome = Matcher | RequestError


def load_by_name(model: str) -> Tokenizer:
    """Load the tokenizer of a model; with `partial` a `LoadTokenizer` that a worker can call."""
    return load_tokenizer(resolve(model, report=log.debug))


class GrammarMatcher:
    """A `Matcher` over xgrammar's."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._row = None

    def accept(self, token: int) -> bool:
        """Go on by one token, unless the grammar does not have it."""
        return not self._matcher.is_terminated() and self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        self._matcher.rollback(count)

    def restrict(self, words: Words) -> None:
        """Clear the bits of the tokens that cannot come next."""
        if self._matcher.is_terminated():
            words[:] = 0
            return
        allowed = words.copy()[None, :]
        if self._matcher.fill_next_token_bitmask(allowed, 0):
            words &= allowed[0]

    @property
    def ended(self) -> bool:
        """Whether the end was accepted."""
        return bool(self._matcher.is_terminated())


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    waiting: list[Submit] = field(default_factory=list)
    result: xgrammar.CompiledGrammar | str = ""  # the compiled grammar, or what is wrong with it


class Grammars:
    """Compiles grammars for requests. One thread, the engine's, calls the methods."""

    def __init__(self, *, load: LoadTokenizer, vocab_size: int, wake: Callable[[], None]) -> None:
        """Start the worker. `wake` is called, from another thread, when something has finished."""
        self._load = load
        self._vocab_size = vocab_size
        self._wake = wake
        self._kept: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._open: dict[Grammar, _Job] = {}
        self._ready: deque[tuple[Submit, Outcome]] = deque()
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def start(self, message: Submit) -> None:
        """Get the grammar of a request, from what is kept or from the worker."""
        grammar = message.rules.grammar
        assert grammar is not None, "only requests with a grammar come here"
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            self._ready.append((message, GrammarMatcher(self._kept[grammar])))
        elif grammar in self._open:
            self._open[grammar].waiting.append(message)
        else:
            job = self._open[grammar] = _Job(grammar, [message])
            self._todo.put(job)

    def finished(self) -> Iterator[tuple[Submit, Outcome]]:
        """Yield the requests whose grammar is there, or was refused, since the last time."""
        while not self._done.empty():
            self._finish(self._done.get())
        while self._ready:
            yield self._ready.popleft()

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits for its grammar, if it does."""
        for job in self._open.values():
            job.waiting = [m for m in job.waiting if m.request_id != request_id]

    def close(self) -> None:
        """Stop the worker."""
        self._todo.put(None)
        self._thread.join()

    def _finish(self, job: _Job) -> None:
        del self._open[job.grammar]
        result = job.result
        if isinstance(result, str):
            self._ready.extend((message, _refusal(message, result)) for message in job.waiting)
            return
        self._ready.extend((message, GrammarMatcher(result)) for message in job.waiting)
        self._kept[job.grammar] = result
        while sum(kept.memory_size_bytes for kept in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    # In the thread

    def _run(self) -> None:
        process = _Worker(self._load, self._vocab_size)
        info = worker.vocabulary(self._load(), self._vocab_size)
        while (job := self._todo.get()) is not None:
            job.result = _compiled(process, job.grammar, info)
            self._done.put(job)
            self._wake()
        process.close()


class _Worker:
    """The worker process; a new one when it has died."""

    _ready: bool
    _pipe: Connection
    _process: subprocess.Popen[bytes]

    def __init__(self, load: LoadTokenizer, vocab_size: int) -> None:
        self._settings = (load, vocab_size)
        self._start()

    def ask(self, grammar: Grammar) -> tuple[bool, str]:
        """Return the compiled grammar as text, or False and what is wrong with it."""
        began = False
        try:
            if not self._ready:
                self._ready = self._pipe.recv()
            began = True
            self._pipe.send(grammar)
            answer: tuple[bool, str] = self._pipe.recv()
            return answer
        except (EOFError, ConnectionError):
            status = self._process.wait()
            self._pipe.close()
            self._start()
        if not began:
            log.error("the compiler of grammars ended with status %d when it started", status)
            return False, "the compiler of grammars does not start; the server's log says why"
        if status == -signal.SIGALRM:
            return False, f"it takes more than {COMPILE_SECONDS:g} seconds to compile"
        return False, f"the compiler ended with status {status}: it may use {COMPILE_MIB} MiB"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _start(self) -> None:
        self._ready = False
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", worker.__name__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe.send(self._settings)


def _compiled(
    process: _Worker, grammar: Grammar, info: xgrammar.TokenizerInfo
) -> xgrammar.CompiledGrammar | str:
    """Return the compiled grammar, or what is wrong with it."""
    import xgrammar

    whole, text = process.ask(grammar)
    if not whole:
        return text
    compiled = xgrammar.CompiledGrammar.deserialize_json(text, info)
    if compiled.memory_size_bytes > KEPT_BYTES // 8:
        return f"compiled it takes {compiled.memory_size_bytes >> 20} MiB"
    return compiled


def _refusal(message: Submit, reason: str) -> RequestError:
    param = message.rules.grammar_param
    return RequestError(f"'{param}' cannot be used: {reason}.", param=param, code="invalid_grammar")
