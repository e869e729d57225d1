"""One request as the scheduler sees it, and the limits that it must keep.

`token_ids` is the prompt and every output token that the host has read. Steps run while the host
plans, so there are two counts of the positions whose KV is written: `scheduled` (some step that
was planned writes them) and `computed` (a step that has ended wrote them); and `pending` output
tokens were planned to be sampled but have not been read.

While a verify is in flight, `scheduled` and `pending` take all of its drafts for accepted;
`speculated` of the pending tokens may turn out not to exist. Its commit takes them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trnc.core import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ExecutorInfo,
    FinishReason,
    SamplingParams,
)
from trnc.engine.messages import Rules, Submit
from trnc.engine.penalties import TokenCounts, token_counts
from trnc.engine.radix import Node
from trnc.engine.rules import Matcher, TokenRules
from trnc.errors import RequestError


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The mutable state of one request.

    `preemptions` also tells a step that was planned before the last preemption (what it wrote is
    lost) from one planned since. `node` is the deepest page that it shares through the prefix
    tree: the first `node.depth` of `pages` are the tree's, the others are its own. `table` is what
    the last plan had of `pages`, so that the next one need not copy them; who replaces a page
    empties it. `leader` is a request with the same prompt whose prefill this one waits for; it is
    let go at the first admission. `primed`: the slot holds its last token, and the state that a
    draft starts from. `drafts` are on the device for the next verify; `draft_ids` are these, once
    they are read, of a request that needs them. `drafted` and `accepted` are totals.

    Requests stand in the line in the order of their `place`: by priority, then by arrival.

    `rules` and `counts` are None where the request has none. `score_next` is the token of the
    prompt whose log-probability is wanted next; the prompt's length where none is.
    """

    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    score_next: int
    place: tuple[int, int] = (0, 0)
    rules: TokenRules | None = None
    counts: TokenCounts | None = None
    leader: Request | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    slot: int | None = None
    node: Node | None = None
    pages: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()
    scheduled: int = 0
    computed: int = 0
    pending: int = 0
    speculated: int = 0
    primed: bool = False
    drafts: int = 0
    draft_ids: tuple[int, ...] | None = None
    drafted: int = 0
    accepted: int = 0
    ended: bool = False

    @property
    def next_output(self) -> int:
        """The output index of the next token that has not been planned to be sampled."""
        return len(self.token_ids) - self.prompt_tokens + self.pending

    @property
    def remaining(self) -> int:
        """How many positions must still be scheduled before the next token can be sampled."""
        return len(self.token_ids) + self.pending - self.scheduled

    @property
    def can_decode(self) -> bool:
        """Whether one known position leads to the next token, and that token is wanted.

        A request that needs its last tokens on the host sits out a step planned before it has them.
        """
        unread = self.pending or (self.drafts and self.draft_ids is None)
        if self.needs_last_token and unread:
            return False
        return self.remaining == 1 and not self.speculated and self.next_output < self.max_tokens

    @property
    def needs_last_token(self) -> bool:
        """Whether a step's inputs depend on the tokens before it: masks and penalties may."""
        return self.counts is not None or self.follows_rules

    @property
    def follows_rules(self) -> bool:
        """Whether which tokens are allowed depends on the tokens before them."""
        return self.rules is not None and self.rules.need_last_token

    @property
    def can_draft(self) -> bool:
        """Whether the device can draft, and two more tokens are wanted, if not more."""
        least = self.next_output - self.speculated
        ready = self.primed and not self.drafts and self.remaining == 1
        return ready and least + 1 < self.max_tokens

    def take_drafts(self, tokens: tuple[int, ...]) -> None:
        """Take the drafts of a request that needs its last token, as its rules lead them."""
        self.draft_ids = tokens if self.rules is None else self.rules.lead(tokens)

    def take(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append picked tokens up to where the text ends, if it does; return them, and why."""
        for index, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if (reason := self._ended_by(token)) is not None:
                return tuple(tokens[:index]), reason
        return tuple(tokens), None

    def _ended_by(self, token: int) -> FinishReason | None:
        if self.counts is not None:
            self.counts.add(token)
        if self.rules is not None:
            self.rules.advance(token)
        if token in self.stop_token_ids:
            return "stop"
        if self.rules is not None and (self.rules.broken or self.rules.over):
            return "error" if self.rules.broken else "stop"
        output = len(self.token_ids) - self.prompt_tokens
        return "length" if output >= self.max_tokens else None

    @property
    def most_positions(self) -> int:
        """How many positions can ever be computed: the last output token never is."""
        return self.prompt_tokens + self.max_tokens - 1


def new_request(message: Submit, info: ExecutorInfo, matcher: Matcher | None = None) -> Request:
    """Return the request that a client asked for, its `max_tokens` cut to `info.max_context`.

    `matcher` is that of its grammar, if it has one.

    Raises:
        RequestError: a limit is broken; `param` names the field and the text the numbers.
    """
    prompt_tokens = len(message.prompt_ids)
    _check_fields(message, info)
    if prompt_tokens >= info.max_context:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens, but prompt and output together may have at"
            f" most {info.max_context} (max_context of the preset). Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = min(message.max_tokens, info.max_context - prompt_tokens)
    _check_pages(prompt_tokens, max_tokens, info)
    return Request(
        request_id=message.request_id,
        token_ids=[*message.prompt_ids, *message.resume_ids],
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        sampling=message.sampling,
        stop_token_ids=frozenset(message.stop_token_ids),
        score_next=_first_scored(message),
        rules=_token_rules(message, info, matcher),
        counts=token_counts(message.sampling, message.prompt_ids, message.resume_ids),
    )


def _first_scored(message: Submit) -> int:
    """A resumed request was given the log-probabilities of its prompt before."""
    if message.sampling.prompt_logprobs is None or message.resume_ids:
        return len(message.prompt_ids)
    return max(message.prompt_logprobs_from, 1)


def _token_rules(message: Submit, info: ExecutorInfo, matcher: Matcher | None) -> TokenRules | None:
    if message.rules == Rules():
        return None
    return TokenRules(
        message.rules,
        vocab_size=info.vocab_size,
        stop_token_ids=message.stop_token_ids,
        matcher=matcher,
        output=message.resume_ids,
    )


def _check_fields(message: Submit, info: ExecutorInfo) -> None:
    if not message.prompt_ids:
        raise RequestError("The prompt is empty; it must have at least one token.", param="prompt")
    if message.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be at least 1, got {message.max_tokens}.", param="max_tokens"
        )
    sampling = message.sampling
    _check_ids("prompt", (*message.prompt_ids, *message.resume_ids), info)
    rules = message.rules
    _check_ids("allowed_token_ids", rules.allowed_token_ids or (), info)
    _check_ids("bad_words", (token for word in rules.bad_words for token in word), info)
    _check_ids("stop_token_ids", message.stop_token_ids, info)
    _check_ids("logit_bias", (token for token, _ in sampling.logit_bias), info)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias may have at most {MAX_LOGIT_BIAS} entries, got"
            f" {len(sampling.logit_bias)}.",
            param="logit_bias",
        )
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {sampling.logprobs}.",
            param="top_logprobs",
        )


def _check_ids(param: str, token_ids: Iterable[int], info: ExecutorInfo) -> None:
    for token in token_ids:
        if not 0 <= token < info.vocab_size:
            raise RequestError(
                f"{param} has the token id {token}, which is outside the model's vocabulary"
                f" (0 to {info.vocab_size - 1}).",
                param=param,
            )


def _check_pages(prompt_tokens: int, max_tokens: int, info: ExecutorInfo) -> None:
    """A request that fits alone can always be served, by preempting the others."""
    have = info.num_pages - 1
    # The last output token is sampled but never computed.
    need = -(-(prompt_tokens + max_tokens - 1) // info.page_size)
    if need <= have:
        return
    too_long = "prompt" if -(-prompt_tokens // info.page_size) > have else "max_tokens"
    raise RequestError(
        f"The prompt of {prompt_tokens} tokens with max_tokens {max_tokens} needs {need} KV pages"
        f" of {info.page_size} tokens, but there are {have}. Lower {too_long}, or raise"
        " kv_memory_mib of the preset.",
        param=too_long,
    )
