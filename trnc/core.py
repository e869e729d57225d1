"""The vocabulary of trnc as frozen dataclasses. Imports nothing of ours.

`StepPlan` is the line between host and device: the scheduler writes one, the catalog turns it into
a `VariantKey`, and the executor runs that variant's program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal["prefill", "decode", "draft", "verify"]
Sampling = Literal["greedy", "sample"]
FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS, MAX_LOGIT_BIAS = 20, 512  # the widths of these stages; more is a 400


@dataclass(frozen=True, slots=True, order=True)
class VariantKey:
    """Names one compiled variant. A default of a feature means "absent from the graph".

    It has `tokens` token rows, `rows` sequences, `depth` drafts and `penalties` entries of each.
    """

    step: Step
    tokens: int
    rows: int
    sampling: Sampling = "greedy"
    logprobs: bool = False
    logit_bias: bool = False
    depth: int = 0
    mask: bool = False
    penalties: int = 0
    prompt_logprobs: bool = False
    context: int = 0  # the most tokens of a sequence; 0: the graph does not depend on it

    @property
    def logit_rows(self) -> int:
        """How many rows of logits are sampled: a verify samples after each of its tokens."""
        return self.tokens if self.step == "verify" else self.rows

    def __str__(self) -> str:
        """Return e.g. `prefill-256x4/sample+logprobs+penalties64` or `verify-4d2/greedy`."""
        names = ("logprobs", "logit_bias", "mask", "prompt_logprobs")
        flags = "".join(f"+{name}" for name in names if getattr(self, name))
        flags += f"+penalties{self.penalties}" if self.penalties else ""
        size = f"{self.tokens}x{self.rows}" if self.step == "prefill" else f"{self.rows}"
        size += f"d{self.depth}" * bool(self.depth) + f"@{self.context}" * bool(self.context)
        return f"{self.step}-{size}/{self.sampling}{flags}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens. The order of the filters is DESIGN §5.

    `temperature` 0 is greedy; `top_k` 0 means all. `logprobs` and `prompt_logprobs` are None or how
    many alternatives are given; with `penalize_prompt` repetition counts the prompt, too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalize_prompt: bool = True
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's share of a step.

    `slot` is its row in the device state. `token_ids` are computed at positions
    `start .. start + count - 1`; where `token_ids` is None the first is read from the device (the
    last one sampled in `slot`), so that a step can be planned before the last one is read.
    `pages` cover positions `0 .. start + count - 1`. If `sample`, the step picks the token that
    follows, as output number `output_index` of the request (the noise depends on it). `following`
    is the token at `start + count` where the request has one already. In a `verify` what
    `token_ids` lacks are the slot's drafts, and one token is picked after each. A `draft` stands on
    the device's own position: `start` is the furthest that it can be, and only the difference of
    `output_index` and `start` matters. What is not used is empty. For each row of logits, `masks`
    are packed bits of the tokens that may be picked, `counts` (int32) the penalised ids, then how
    often each was output; `targets` the token after each whose log-probability is wanted, else -1.
    """

    slot: int
    start: int
    count: int
    token_ids: tuple[int, ...] | None
    pages: tuple[int, ...]
    sample: bool
    output_index: int
    sampling: SamplingParams
    following: int | None = None
    masks: tuple[bytes, ...] = ()
    counts: tuple[bytes, ...] = ()
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One call of the device, in plain data. `depth` is how far a draft or a verify goes."""

    step: Step
    sequences: tuple[SequencePlan, ...]
    depth: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs, of the raw logits: the chosen token's and the top ones', best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step picked, for each sequence of the plan: nothing where it did not sample.
    A `draft` gives its drafts, a `verify` the accepted ones and the token after them. There are as
    many `logprobs` if asked for; `prompt_logprobs` are of the `targets`. `micros` is device time.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    micros: int = 0
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the scheduler must know of an executor. Page 0 is never handed out: padding uses it.
    `mtp_depths` are the depths that it can speculate; with `mtp_always` nothing else decodes.
    """

    max_rows: int
    max_prefill_tokens: int
    max_context: int
    page_size: int
    num_pages: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    mtp_depths: tuple[int, ...] = ()
    mtp_always: bool = False
    rounds: tuple[tuple[int, int, int], ...] = ()  # sequences, depth, micros: as first measured
