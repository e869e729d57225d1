"""Every pair of features, greedy and seeded: with speculation the bits are those without."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import combinations_with_replacement
from typing import Any

import jsonschema
import pytest
import xgrammar
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.driver import Driver
from tests.models.tiny import VOCAB
from tests.runtime.serving import Limited, Outcome, Prompted, outcome
from tests.runtime.test_one_answer import TEXT
from trnc.core import SamplingParams, StepPlan, StepResult
from trnc.engine.grammar import GrammarMatcher
from trnc.engine.grammar_worker import compile_grammar
from trnc.engine.loops import overlapped_loop, plain_loop
from trnc.engine.messages import Grammar, Rules, Submit, Thinking
from trnc.engine.rules import Matcher
from trnc.errors import RequestError
from trnc.runtime.executor import ProgramExecutor

EOS, END, BUDGET = 2, (11, 12), 4
# The text of each token: printable ones, and a few that are several characters of JSON at once.
WORDS = [b"", b"", b"", *(bytes([c]) for c in range(32, 127)), b'": ', b'"}', b', "', b'{"a', b"[1"]
WORDS += [b"\xff"] * (VOCAB - len(WORDS))


@dataclass(frozen=True)
class Feature:
    """What a feature sets in a request."""

    sampling: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)


FEATURES = {
    "grammar": Feature(),  # of a schema that is drawn
    "penalties": Feature({"repetition_penalty": 1.6, "frequency_penalty": 0.4}),
    "presence": Feature({"presence_penalty": 0.9, "penalize_prompt": False}),
    "bias": Feature({"logit_bias": ((5, 4.0), (40, 3.0), (90, -9.0))}),
    "logprobs": Feature({"logprobs": 3}),
    "prompt_logprobs": Feature({"prompt_logprobs": 2}),
    "filters": Feature({"top_k": 40, "top_p": 0.9, "min_p": 0.02}),
    "min_tokens": Feature(rules={"min_tokens": 9}),
    "thinking": Feature(rules={"thinking": Thinking(end_ids=END, open=True, budget=BUDGET)}),
    "allowed": Feature(rules={"allowed_token_ids": tuple(range(VOCAB - 30))}),
    "bad_words": Feature(rules={"bad_words": ((93,), (91, 92))}),  # z, and y after x
}
PAIRS = list(combinations_with_replacement(FEATURES, 2))  # and each feature alone

schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 99},
            {"type": "boolean"},
            {"enum": ["red", 3, None]},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
        ]
    ),
    lambda inner: (
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(
            lambda named: {
                "type": "object",
                "properties": named,
                "required": sorted(named)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c"]), inner, min_size=1, max_size=2),
        )
    ),
    max_leaves=4,
)


class Compiled:
    """`Grammars` that are compiled at once."""

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo(
            WORDS, vocab_type=xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._ready: list[tuple[Submit, Matcher | RequestError]] = []

    def start(self, message: Submit) -> None:
        assert message.rules.grammar is not None
        compiled = compile_grammar(self._compiler, message.rules.grammar)
        self._ready.append((message, GrammarMatcher(compiled)))

    def finished(self) -> Iterable[tuple[Submit, Matcher | RequestError]]:
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, request_id: str) -> None:
        raise AssertionError("nobody cancels here")


class Foretold(Prompted):
    """Drafts what is named in the verify, so that the host's masks are of those drafts, too."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = super().submit(plan)
        if plan.step != "draft":
            return future
        result = future.result()
        named = [self._drafts(s.sampling.seed, s.output_index, s.count) for s in plan.sequences]
        drafts = (
            (*told, *own[len(told) :]) for told, own in zip(named, result.tokens, strict=True)
        )
        foretold: Future[StepResult] = Future()
        foretold.set_result(replace(result, tokens=tuple(drafts)))
        return foretold


def request_of(pair: tuple[str, str], number: int, schema: Any, temperature: float) -> Submit:
    parts = [FEATURES[name] for name in dict.fromkeys(pair)]
    sampling: dict[str, Any] = reduce(dict.__or__, (part.sampling for part in parts), {})
    rules: dict[str, Any] = reduce(dict.__or__, (part.rules for part in parts), {})
    if "grammar" in pair:
        rules["grammar"] = Grammar("json_schema", json.dumps(schema))
    prompt = TEXT[number : number + 3 + number % 20]
    params = SamplingParams(temperature=temperature, seed=number, **sampling)
    return Submit("+".join(pair), prompt, params, 30, (EOS,), rules=Rules(**rules))


def run(
    executor: ProgramExecutor,
    requests: list[Submit],
    answers: dict[int, list[int]] | None = None,
    right: int = 0,
    always: bool = False,
) -> Driver:
    """Serve all requests at once: without speculation, or with drafts of which some are right.

    They are as many as pay, or with `always` as many as there can be.
    """
    depths = executor.info.mtp_depths if answers is not None else ()
    foretold = Foretold(
        executor=executor,
        info=replace(executor.info, mtp_depths=depths, mtp_always=always),
        answers=answers or {},
        right=lambda index: index % 5 < right,
    )
    driver = Driver(executor=foretold, arrivals={0: requests}, grammars=Compiled())  # type: ignore[arg-type]
    return driver.serve(plain_loop)


def scored(driver: Driver, request_id: str) -> tuple[Outcome, list[Any]]:
    scores = [entry for d in driver.deltas(request_id) for entry in d.prompt_logprobs]
    return outcome(driver, request_id), scores


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],  # one example runs for seconds: no shrinking
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=schemas, right=st.sampled_from([3, 4, 5]), always=st.booleans())
def test_speculation_gives_the_bits_of_plain_decoding(featured, temperature, schema, right, always):
    requests = [request_of(pair, i, schema, temperature) for i, pair in enumerate(PAIRS)]
    plain = run(featured, requests)
    answers = {request.sampling.seed: plain.tokens(request.request_id) for request in requests}
    speculating = run(featured, requests, answers, right, always)
    assert not plain.failures()
    for request in requests:
        assert scored(speculating, request.request_id) == scored(plain, request.request_id)
        if request.rules.thinking is not None:
            assert thoughts_end(plain.tokens(request.request_id)) <= BUDGET + len(END)
    counters = speculating.scheduler.counters
    assert sum(counters.accepted) > (100 if always else 0)
    assert plain.scheduler.counters.verify_steps == 0
    # In 30 tokens not every text comes to its end.
    ended = [r for r in requests if r.rules.grammar and plain.finish(r.request_id) == "stop"]
    for request in ended:
        jsonschema.validate(json.loads(text_of(plain, request)), schema)


def thoughts_end(tokens: list[int]) -> int:
    size = len(END)
    return size + next(i for i in range(len(tokens)) if tuple(tokens[i : i + size]) == END)


def text_of(driver: Driver, request: Submit) -> bytes:
    tokens = driver.tokens(request.request_id)
    if request.rules.thinking is not None:
        tokens = tokens[thoughts_end(tokens) :]
    return b"".join(WORDS[token] for token in tokens if token != EOS)


def test_every_field_of_a_request_is_in_some_pair():
    used = {name for feature in FEATURES.values() for name in (*feature.sampling, *feature.rules)}
    known = {f.name for f in fields(SamplingParams)} | set(Rules.__struct_fields__)
    assert known - used == {"temperature", "seed", "grammar", "grammar_param"}


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("loop", [plain_loop, overlapped_loop])
def test_drafts_keep_to_the_grammar(featured, loop, temperature):
    """The first of each round, which is masked on the device, and where only one token may come."""
    schema = {"enum": ["a word or two", "a word, or one"]}
    requests = [request_of(("grammar",), i, schema, temperature) for i in range(3)]
    executor = Limited(executor=featured, info=replace(featured.info, mtp_always=True))
    driver = Driver(executor=executor, arrivals={0: requests}, grammars=Compiled())  # type: ignore[arg-type]
    driver.serve(loop)
    verifies = [plan for plan in executor.plans if plan.step == "verify"]
    drafted = [s for plan in verifies for s in plan.sequences if s.count > 1]
    for sequence in drafted:
        _, *drafts = sequence.token_ids
        for i, (draft, mask) in enumerate(zip(drafts, sequence.masks, strict=False)):
            if i == 0 or allowed(mask) == 1:
                assert allows(mask, draft)
            if draft == EOS or not allows(mask, draft):
                break  # what follows is never read
    for request in requests:
        assert json.loads(text_of(driver, request)) in schema["enum"]
    sure = sum(allowed(sequence.masks[0]) == 1 for sequence in drafted if sequence.masks)
    assert driver.scheduler.counters.accepted[0] >= sure > 0


def allowed(mask: bytes) -> int:
    return int.from_bytes(mask, "little").bit_count() if mask else VOCAB


def allows(mask: bytes, token: int) -> bool:
    return not mask or bool(int.from_bytes(mask, "little") >> token & 1)
