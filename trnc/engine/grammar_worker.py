"""The process that compiles grammars: `python -m trnc.engine.grammar_worker DESCRIPTOR`.

It is sent a `LoadTokenizer` and the size of the vocabulary, then one `Grammar` after the other.
What a grammar may cost is limited here: an alarm ends the process, whatever it is doing, and memory
beyond what it had when it was ready is refused to it.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.grammar_text import GLM_STRINGS, JSON_STRINGS, Faults, check_source, mend
from trnc.engine.messages import MAX_WHITESPACE, Grammar

if TYPE_CHECKING:
    import xgrammar

COMPILE_SECONDS = 10.0
COMPILE_MIB = 1024
NO_TEXT = b"\xff"  # never a part of UTF-8

LoadTokenizer = Callable[[], Tokenizer]


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> xgrammar.TokenizerInfo:
    """Return what each token adds to a text, as xgrammar wants it.

    Special tokens add a byte that no text has, so that only a grammar that names a token has it.
    With no bytes at all xgrammar would not take it even there.
    """
    import xgrammar

    known = min(tokenizer.vocab_size, vocab_size)
    table = [
        NO_TEXT if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        for token in range(known)
    ]
    return xgrammar.TokenizerInfo(
        table,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=[token for token in tokenizer.eos_token_ids if token < known],
    )


def compile_grammar(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar
) -> xgrammar.CompiledGrammar:
    """Compile one grammar; raises what xgrammar raises where the source is wrong."""
    check_source(grammar.source)
    return compiler.compile_grammar(_mended(*_parsed(grammar)))


def _parsed(grammar: Grammar) -> tuple[xgrammar.Grammar, Faults]:
    """Return a grammar, and what is to be mended in it.

    White space in JSON is free but not endless, or a model might never come to an end. Objects of a
    schema have no properties but those that it names.
    """
    import xgrammar

    source = grammar.source
    match grammar.kind:
        case "json" | "json_schema":
            named = grammar.kind == "json_schema"
            parsed = xgrammar.Grammar.from_json_schema(
                source if named else '{"type": "object"}',
                strict_mode=named,
                max_whitespace_cnt=MAX_WHITESPACE,
            )
            return parsed, JSON_STRINGS
        case "regex":
            return xgrammar.Grammar.from_regex(source), ()
        case "ebnf":
            return xgrammar.Grammar.from_ebnf(source), ()
        case "structural_tag":
            faults = JSON_STRINGS + (GLM_STRINGS if '"glm_xml"' in source else ())
            return xgrammar.Grammar.from_structural_tag(source), faults


def _mended(grammar: xgrammar.Grammar, faults: Faults) -> xgrammar.Grammar:
    import xgrammar

    text = str(grammar)
    mended = mend(text, faults)
    return grammar if mended == text else xgrammar.Grammar.from_ebnf(mended)


def work(pipe: Connection) -> None:
    """Say True once ready, then answer each grammar with its compiled text or what is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    load, vocab_size = pipe.recv()
    import xgrammar

    compiler = xgrammar.GrammarCompiler(
        vocabulary(load(), vocab_size), max_threads=1, cache_enabled=False
    )
    _limit_memory()
    pipe.send(True)
    with suppress(EOFError, BrokenPipeError):  # the engine is gone
        while True:
            grammar: Grammar = pipe.recv()
            signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)
            try:
                answer = (True, compile_grammar(compiler, grammar).serialize_json())
            except Exception as error:  # the library's errors have no base of their own
                answer = (False, _plain(str(error)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(answer)


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    limit = (used + COMPILE_MIB * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _plain(text: str) -> str:
    """Drop the library's time stamp and source line from its message."""
    said = re.sub(r"^\[[\d:]+\] \S+\.cc:\d+: ", "", text)
    return " ".join(said.split()).rstrip(".")[:300]


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
