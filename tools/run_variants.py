"""Run the modules of Trainium's backend on XLA's CPU, variant by variant, beside the reference.

    python tools/run_variants.py MODEL [--preset default ...] [--features none each all] [--whole]

MODEL is as in tools/lower_config.py. Weights, state and steps are drawn by chance: a prefill (and a
draft) fill the state on both sides, then each variant runs one step from there in which all that it
has is used. Its tokens must be those of the eager reference on the same packed weights, and its
log-probabilities within a bound. Contexts are cut to `--context`, with a bucket of a quarter of it,
and of rows and tokens only the smallest `--buckets` are kept.

Compiling a module takes a second or more, so functions are compiled once each and a step runs as
calls of them; `--whole` compiles every module as it is, with its donated state. `--largest` takes
one variant of each step, `--weights` the weights of a checkpoint: drawn ones of a deep model make
much of a rounding. Prints each difference; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from lower_config import Traced, largest, read
from variants.backends import EagerSide, Stepwise, XlaSide, run_step
from variants.draw import Drawer, draw_weights, read_weights

from trnc.compiler.backends.stablehlo.build import Plan, plan_modules
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import neuron_target
from trnc.compiler.graphs import LockedModel, config_of
from trnc.core import StepPlan, StepResult, TokenLogprobs, VariantKey
from trnc.presets import FEATURES, Preset, load_preset, preset_names, with_features
from trnc.runtime.xla_client import Devices

# Of log-probabilities. A key between two values that the cache can hold may be rounded to either.
BOUNDS: Mapping[str, float] = {"float32": 1e-4, "float16": 0.005, "bfloat16": 0.05, "int8": 0.05}


@dataclass
class Tally:
    """What was run, and what differed."""

    variants: int = 0
    tokens: int = 0
    accepted: int = 0
    largest_error: float = 0.0
    differences: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


def feature_sets(names: Sequence[str]) -> Iterator[dict[str, bool]]:
    """Yield which features are on: none of them, each alone, all at once."""
    nothing = dict.fromkeys(FEATURES, False)
    if "none" in names:
        yield nothing
    if "each" in names:
        yield from (nothing | {feature: True} for feature in FEATURES)
    if "all" in names:
        yield dict.fromkeys(FEATURES, True)


def cut(preset: Preset, context: int, buckets: int | None, kv_dtype: str | None = None) -> Preset:
    """Shorten the contexts of a preset, in two buckets, and keep its smallest other buckets."""
    full = min(preset.max_context, context)
    quarter = max(full // 4 // preset.page_size, 1) * preset.page_size
    return replace(
        preset,
        decode_rows=preset.decode_rows[:buckets],
        prefill_tokens=preset.prefill_tokens[:buckets],
        max_context=full,
        kv_dtype=kv_dtype or preset.kv_dtype,  # type: ignore[arg-type]
        trainium=replace(preset.trainium, context_buckets=(quarter,)),
    )


def check_plan(
    plan: Plan,
    keys: Sequence[VariantKey],
    devices: Devices,
    seed: int,
    tally: Tally,
    weights: str | None = None,
) -> None:
    """Run the variants that no other configuration has had yet."""
    modules = {key: plan.lower(key) for key in (*warm_keys(plan), *keys)}
    new = [key for key in keys if modules[key].digest not in tally.seen]
    tally.seen.update(modules[key].digest for key in new)
    if new:
        pair = Pair(plan, modules, devices, seed, weights)
        for key in new:
            pair.check(key, tally)


def warm_keys(plan: Plan) -> list[VariantKey]:
    """The variants that fill the state: the longest plain prefill and, if there is one, draft."""
    plain = [k for k in plan.programs if k.sampling == "greedy" and not k.prompt_logprobs]
    keys = [max((k for k in plain if k.step == "prefill"), key=lambda k: (k.tokens, k))]
    drafts = [key for key in plain if key.step == "draft"]
    return [*keys, max(drafts, key=lambda k: (k.rows, k.depth))] if drafts else keys


class Pair:
    """Both sides of one configuration, with the state that every step begins from."""

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[VariantKey, Module],
        devices: Devices,
        seed: int,
        weights: str | None = None,
    ) -> None:
        tensors = read_weights(plan, weights) if weights else draw_weights(plan, seed)
        preset = plan.config.preset
        self._plan, self._bound = plan, BOUNDS[preset.kv_dtype]
        self._drawer = Drawer(preset, plan.config.model.vocab_size, random.Random(seed))
        self._xla = XlaSide(plan, modules, tensors, devices)
        self._eager = EagerSide(plan, tensors)
        for key in warm_keys(plan):
            got, wanted = self._run(key, self._drawer.first(key))
            assert got.tokens == wanted.tokens, f"{key} fills the state in two ways"
        self._states = self._xla.saved(), self._eager.saved()

    def check(self, key: VariantKey, tally: Tally) -> None:
        """Run a variant on both sides and note what differs."""
        step = self._drawer.plan(key)
        if key.step == "verify":
            step = self._with_right_drafts(key, step)
        self._restore()
        got, wanted = self._run(key, step)
        tally.variants += 1
        tally.tokens += sum(map(len, wanted.tokens))
        tally.accepted += sum(len(t) - 1 for t in wanted.tokens) if key.step == "verify" else 0
        error = max(
            score_error(got.logprobs, wanted.logprobs),
            score_error(got.prompt_logprobs, wanted.prompt_logprobs),
        )
        tally.largest_error = max(tally.largest_error, error)
        if got.tokens != wanted.tokens:
            tally.differences.append(f"{key}: {got.tokens}, and the reference {wanted.tokens}")
        if error > self._bound:
            tally.differences.append(f"{key}: log-probabilities differ by {error:.2g}")
        error, name = max((error, name) for name, error in self._state_errors())
        if error > self._bound:
            tally.differences.append(f"{key}: {name} differs by {error:.2g} afterwards")

    def _run(self, key: VariantKey, step: StepPlan) -> tuple[StepResult, StepResult]:
        return run_step(self._plan, self._xla, key, step), run_step(
            self._plan, self._eager, key, step
        )

    def _restore(self) -> None:
        self._xla.restore(self._states[0])
        self._eager.restore(self._states[1])

    def _with_right_drafts(self, key: VariantKey, step: StepPlan) -> StepPlan:
        """Name the first draft of every other sequence: what the reference picks there."""
        dice = self._drawer.dice
        named = [
            replace(sequence, token_ids=(dice.randrange(self._drawer.vocab),))
            if index % 2
            else sequence
            for index, sequence in enumerate(step.sequences)
        ]
        self._restore()
        step = replace(step, sequences=tuple(named))
        picked = run_step(self._plan, self._eager, key, step).tokens
        right = [
            replace(s, token_ids=(*s.token_ids, tokens[0])) if s.token_ids and s.count > 1 else s
            for s, tokens in zip(named, picked, strict=True)
        ]
        return replace(step, sequences=tuple(right))

    def _state_errors(self) -> Iterator[tuple[str, float]]:
        """Compare the state that is not packed into bytes. Padding writes to page 0, and to the
        last slot.
        """
        wanted = self._eager.saved()
        for name, array in self._xla.saved().items():
            if wanted[name].dtype != torch.int8:
                used = (
                    slice(1, None) if "pages" in name else slice(self._plan.config.preset.max_rows)
                )
                kept = wanted[name][used].double()
                error = (torch.from_numpy(array.astype("float64"))[used] - kept).abs()
                yield name, float((error / kept.abs().clamp(min=1)).max())


Scores = Sequence[Sequence[TokenLogprobs]]


def score_error(got: Scores, wanted: Scores) -> float:
    """Return the largest difference of log-probabilities; infinite where the best are others.

    Where not as many tokens were picked, those that both have are compared.
    """
    errors = [0.0]
    for sequence, others in zip(got, wanted, strict=True):
        for entry, other in zip(sequence, others, strict=False):
            top = dict(other.top)
            errors.append(abs(entry.logprob - other.logprob))
            errors += [abs(value - top.get(token, float("inf"))) for token, value in entry.top]
    return max(errors)


def check(
    locked: LockedModel, name: str, arguments: argparse.Namespace, devices: Devices, known: Traced
) -> Tally:
    """Check the variants of one preset under all sets of features."""
    tally = Tally()
    for switched in feature_sets(arguments.features):
        preset = cut(
            with_features(load_preset(name), switched),
            arguments.context,
            arguments.buckets,
            arguments.kv_dtype,
        )
        plan = plan_modules(
            config_of(locked, preset), neuron_target("trn2"), report=lambda *_: None, known=known
        )
        keys = list(plan.programs)
        keys = largest(keys) if arguments.largest else keys
        check_plan(plan, keys, devices, arguments.seed, tally, arguments.weights)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a config.json, or the name of a model in graphs/")
    parser.add_argument("--preset", nargs="+", default=["default"], help="names, or 'all'")
    parser.add_argument(
        "--features", nargs="+", choices=("none", "each", "all"), default=["none", "each", "all"]
    )
    parser.add_argument("--context", type=int, default=768, help="the longest context")
    parser.add_argument("--buckets", type=int, help="how many of rows and of tokens; all")
    parser.add_argument("--largest", action="store_true", help="one variant of each step")
    parser.add_argument("--whole", action="store_true", help="compile every module as it is")
    parser.add_argument("--weights", help="the checkpoint of the model, instead of drawn weights")
    parser.add_argument("--kv-dtype", choices=tuple(BOUNDS), help="another dtype of the cache")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    locked, known = read(arguments.model), Traced()
    devices = Devices("cpu", 1) if arguments.whole else Stepwise()
    failed = 0
    for name in preset_names() if arguments.preset == ["all"] else arguments.preset:
        began = time.perf_counter()
        tally = check(locked, name, arguments, devices, known)
        print("\n".join((*tally.differences, "")), end="")
        print(
            f"{name}: {tally.variants} variants, {tally.tokens} tokens, {tally.accepted} drafts "
            f"accepted, log-probabilities within {tally.largest_error:.1g}, "
            f"{len(tally.differences)} differences, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        failed += bool(tally.differences)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
