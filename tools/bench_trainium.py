"""What to run on a Trainium machine, in order: one line for each thing that only a device can show.

    python tools/bench_trainium.py [--model smollm2-135m] [--preset default] [--platform neuron]

Every line begins with ok, FAIL or skip, and the last one is the summary; docs/TRAINIUM.md says what
each should show and where to report it. With `--platform cpu` the same steps run on XLA's CPU,
which shows that the tool works, and nothing of a device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from trnc.compiler.backends.stablehlo import neuron
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.engine.offline import run_requests
from trnc.ops.sampling import uniform
from trnc.presets import Preset, load_preset
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.start import Backend, StartOptions, start_executor

VOCAB = 512


@dataclass(frozen=True)
class Line:
    """One result: `state` is ok, FAIL or skip."""

    state: str
    name: str
    said: str


@dataclass(frozen=True)
class Bench:
    """What is measured, and with how many tokens."""

    model: str
    preset: Preset
    platform: str
    store: Path
    prompt: int
    output: int

    @property
    def backend(self) -> Backend:
        return "neuron" if self.platform == "neuron" else "xla-cpu"


def compiler(_: Bench) -> Line:
    """There is a compiler, and it says which."""
    version = neuron.compiler_version()
    if version is None:
        return Line("skip", "compiler", f"no {neuron.COMPILER} on PATH")
    return Line("ok", "compiler", version)


def devices(bench: Bench) -> Line:
    """jax finds enough cores."""
    import jax

    found = jax.devices(bench.platform)
    wanted = bench.preset.trainium.ranks
    state = "ok" if len(found) >= wanted else "FAIL"
    return Line(state, "devices", f"jax {jax.__version__}: {len(found)} cores, {wanted} wanted")


def operators(bench: Bench) -> Line:
    """Every op of our modules is among those that the compiler lists."""
    if neuron.compiler_version() is None:
        return Line("skip", "operators", f"no {neuron.COMPILER} on PATH")
    command = [neuron.COMPILER, "list-operators", "--framework", "XLA"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = {word.lower().replace("-", "_") for word in done.stdout.split()}
    missing = sorted(op for op in _used(bench.store) if op.replace("_", "") not in _flat(listed))
    if done.returncode != 0 or not listed:
        return Line("FAIL", "operators", f"list-operators failed: {done.stderr.strip()[:200]}")
    state = "FAIL" if missing else "ok"
    return Line(state, "operators", f"{len(listed)} listed, missing of ours: {missing or 'none'}")


def _flat(words: set[str]) -> set[str]:
    return {word.replace("_", "") for word in words}


def _used(store: Path) -> set[str]:
    import re

    texts = (path.read_text() for path in store.rglob("module.mlir"))
    return {op for text in texts for op in re.findall(r"stablehlo\.(\w+)", text)} - {"return"}


def noise(bench: Bench) -> Line:
    """32-bit products wrap: the noise of sampling has the bits that every backend has."""
    import jax

    from trnc.compiler.backends.stablehlo.sampling import gumbel

    seeds = np.array([[0x12345678, 0x9ABCDEF0], [0xFFFFFFFF, 0xFFFFFFFF]], np.uint32)
    index = np.array([7, 2**31 - 1], np.int32)
    with jax.default_device(jax.devices(bench.platform)[0]):
        got = np.asarray(jax.jit(lambda s, i: gumbel(s, i, VOCAB))(seeds, index), np.float64)
    wide = torch.tensor([0x123456789ABCDEF0, -1])
    wanted = uniform(wide, torch.tensor(index, dtype=torch.int64), VOCAB).double().numpy()
    error = float(np.abs(np.exp(-np.exp(-got)) - wanted).max())
    state = "ok" if error < 1e-5 else "FAIL"
    return Line(state, "noise", f"largest difference of u: {error:.1e}")


def start(bench: Bench, backend: Backend) -> tuple[ProgramExecutor, float]:
    began = time.perf_counter()
    options = StartOptions(bench.model, bench.preset, backend, bench.store)
    executor, _, _ = start_executor(options, _refuse, lambda line: print(f"     {line}"))
    return executor, time.perf_counter() - began


def _refuse(*_: object) -> object:
    raise AssertionError("this backend compiles nothing of the CPU's")


def prompt_of(bench: Bench, number: int) -> tuple[int, ...]:
    return tuple((i * 7919 + number * 31 + i * i) % 20000 + 100 for i in range(bench.prompt))


def answers(bench: Bench, backend: Backend) -> tuple[list[list[int]], float, list[float]]:
    """Greedy tokens of a full batch, the seconds of the start, and of each step."""
    executor, seconds = start(bench, backend)
    picked: dict[str, list[int]] = {}
    try:
        requests = [
            Submit(str(row), prompt_of(bench, row), SamplingParams(), bench.output)
            for row in range(bench.preset.max_rows)
        ]
        for delta in run_requests(executor, requests):
            picked.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps = [ended - began for began, ended in executor.recent_calls]
    finally:
        executor.close()
    return list(picked.values()), seconds, steps


def serving(bench: Bench) -> Iterator[Line]:
    """The engine runs on the device; its tokens beside those of the eager reference; its speed."""
    got, seconds, steps = answers(bench, bench.backend)
    yield Line("ok", "start", f"{seconds:.1f} s, with what was to be lowered and compiled")
    wanted, _, _ = answers(bench, "eager")
    same = sum(a == b for a, b in zip(got, wanted, strict=True))
    first = min(
        (next((i for i, p in enumerate(zip(a, b, strict=True)) if p[0] != p[1]), bench.output))
        for a, b in zip(got, wanted, strict=True)
    )
    state = "ok" if same == len(got) else "FAIL"
    said = f"{same} of {len(got)} sequences equal the reference, the first {first} tokens of all"
    yield Line(state, "tokens", said)
    decode = steps[-bench.output + 2 :]
    rate = bench.preset.max_rows / median(decode)
    yield Line("ok", "decode", f"{rate:.1f} tok/s at {bench.preset.max_rows} sequences")


def run(bench: Bench) -> list[Line]:
    """Run every step; one that raises is a FAIL, and the next one runs all the same."""
    lines: list[Line] = []
    steps: list[Callable[[Bench], Line]] = [compiler, devices, noise]
    for step in steps:
        _show(lines, step.__name__, lambda step=step: [step(bench)])  # type: ignore[misc]
    _show(lines, "serving", lambda: serving(bench))
    _show(lines, "operators", lambda: [operators(bench)])
    return lines


def _show(lines: list[Line], name: str, step: Callable[[], Iterator[Line] | list[Line]]) -> None:
    try:
        for line in step():
            lines.append(line)
            print(f"{line.state:<4} {line.name}: {line.said}", flush=True)
    except Exception as error:
        lines.append(Line("FAIL", name, f"{type(error).__name__}: {error}"))
        print(f"FAIL {name}: {lines[-1].said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--platform", choices=("neuron", "cpu"), default="neuron")
    parser.add_argument("--store", type=Path, help="default: a new folder")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer, 8 or more")
    arguments = parser.parse_args()
    preset = load_preset(arguments.preset)
    limit = arguments.prompt + arguments.output
    preset = replace(preset, logprobs=False, logit_bias=False)
    if limit > preset.max_context:
        parser.error(f"--prompt and --output are more than the preset's {preset.max_context}")
    store = arguments.store or Path(tempfile.mkdtemp(prefix="trnc-trainium-"))
    bench = Bench(
        model=arguments.model,
        preset=preset,
        platform=arguments.platform,
        store=store,
        prompt=arguments.prompt,
        output=max(arguments.output, 8),
    )
    lines = run(bench)
    failed = [line.name for line in lines if line.state == "FAIL"]
    print(f"{len(lines)} lines, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
