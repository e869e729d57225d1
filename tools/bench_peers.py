"""trnc and llama.cpp on the same model, the same cores and in the same run: a Markdown table.

    pip install llama-cpp-python            # builds for minutes; or a Python that has it:
    python tools/bench_peers.py run --llama-python path/to/python

Every engine is a process of its own that waits between its turns, and the rounds are interleaved,
so that a noisy machine is noisy for all. llama.cpp runs the model requantised to Q4_0, the 4-bit
format that it is fastest with; trnc runs the Q4_1 file as it is. Decode is timed without sampling
for llama.cpp and with it for trnc.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

# The worker's Python need not have trnc installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROMPT = 512  # tokens; decode starts from here
OUTPUT = 64

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: so many sequences, and a seed that makes its prompts new."""

    rows: int
    seed: int

    def prompts(self, vocab: int) -> list[list[int]]:
        """Return random prompts of PROMPT tokens; none of the special ids at the low end."""
        pick = random.Random(self.seed)
        return [[pick.randrange(20, vocab) for _ in range(PROMPT)] for _ in range(self.rows)]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, over all sequences."""

    prefill: float
    decode: float


@app.command("run")
def run(
    llama_python: Annotated[
        str, typer.Option(help="A Python that has llama-cpp-python.")
    ] = sys.executable,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    rows: Annotated[list[int] | None, typer.Option(help="Sequences at once; repeatable.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
) -> None:
    """Measure both engines in interleaved rounds and print medians, ranges and the ratio."""
    wanted = rows or [1, 4, 8]
    commands = {
        "trnc": [sys.executable, __file__, "trnc-worker"],
        "llama.cpp": [llama_python, __file__, "llama-worker"],
    }
    results: dict[tuple[str, int], list[Speed]] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(_engine(command, threads))
            for name, command in commands.items()
        }
        for round_ in range(rounds + 1):
            for count in wanted:
                for name, measure in engines.items():
                    speed = measure(Task(rows=count, seed=1000 * round_ + count))
                    if round_ > 0:  # the first round warms up
                        results.setdefault((name, count), []).append(speed)
            print(f"round {round_} of {rounds}", file=sys.stderr)
    for line in _table(results, wanted):
        print(line)


def _table(results: dict[tuple[str, int], list[Speed]], rows: Sequence[int]) -> Iterator[str]:
    yield "| tok/s, median (min-max) | trnc | llama.cpp Q4_0 | ratio of medians |"
    yield "|---|---|---|---|"
    for phase in ("prefill", "decode"):
        for count in rows:
            ours, theirs = (
                [getattr(speed, phase) for speed in results[name, count]]
                for name in ("trnc", "llama.cpp")
            )
            ratio = statistics.median(ours) / statistics.median(theirs)
            yield (
                f"| {phase}, {count} x {PROMPT} tokens | {_range(ours)} | {_range(theirs)} "
                f"| {ratio:.2f} |"
            )


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


@contextmanager
def _engine(command: list[str], threads: int) -> Iterator[Callable[[Task], Speed]]:
    """Run a worker; yield what measures one task in it."""
    environment = os.environ | {"TRNC_THREADS": str(threads)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def measure(task: Task) -> Speed:
        _write(stdin, {"rows": task.rows, "seed": task.seed})
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(command)} ended with status {process.wait()}")
        return Speed(**json.loads(line))

    try:
        yield measure
    finally:
        stdin.close()
        process.wait(timeout=60)


def _write(file: IO[str], message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _work(measure: Callable[[Task], Speed]) -> None:
    """Answer tasks on stdin until it is closed."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    for line in sys.stdin:
        speed = measure(Task(**json.loads(line)))
        _write(out, {"prefill": speed.prefill, "decode": speed.decode})


@app.command(hidden=True)
def trnc_worker() -> None:
    """Measure trnc with the preset batch8."""
    from rich.console import Console

    from trnc.cli.compile_command import compile_missing
    from trnc.compiler.store import default_root
    from trnc.core import SamplingParams
    from trnc.engine.messages import Submit
    from trnc.engine.scheduler import Scheduler
    from trnc.presets import load_preset
    from trnc.runtime.packed_store import packed_root
    from trnc.runtime.start import StartOptions, start_executor

    console = Console(stderr=True)
    options = StartOptions(
        "smollm2-135m", load_preset("batch8"), "inductor", default_root(), packed_root()
    )
    executor, _, _ = start_executor(
        options,
        lambda *a: compile_missing(*a, jobs=len(os.sched_getaffinity(0)), console=console),
        console.print,
    )

    def measure(task: Task) -> Speed:
        scheduler = Scheduler(info=executor.info)
        for row, prompt in enumerate(task.prompts(executor.info.vocab_size)):
            scheduler.submit(Submit(str(row), tuple(prompt), SamplingParams(), OUTPUT + 1))
        spent = {"prefill": 0.0, "decode": 0.0}
        tokens = {"prefill": 0, "decode": 0}
        begun = time.perf_counter()
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, executor.submit(plan).result())
            done = time.perf_counter()
            # Decodes that run while other prompts are prefilled count for neither phase.
            if plan.step == "prefill" or len(plan.sequences) == task.rows:
                spent[plan.step] += done - begun
                tokens[plan.step] += sum(sequence.count for sequence in plan.sequences)
            begun = done
        return Speed(**{phase: tokens[phase] / spent[phase] for phase in spent})

    _work(measure)


@app.command(hidden=True)
def llama_worker() -> None:
    """Measure llama.cpp through its C API."""
    import llama_cpp as ll

    threads = int(os.environ["TRNC_THREADS"])
    ll.llama_backend_init()
    silent = ll.llama_log_callback(lambda *_: None)  # must live as long as the library logs
    ll.llama_log_set(silent, None)
    path = q4_0(ll)
    model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))

    def measure(task: Task) -> Speed:
        params = ll.llama_context_default_params()
        params.n_ctx = task.rows * (PROMPT + OUTPUT + 32)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = task.rows
        params.n_threads = params.n_threads_batch = threads
        context = ll.llama_init_from_model(model, params)
        try:
            return _measure_llama(ll, context, task.prompts(vocab))
        finally:
            ll.llama_free(context)

    _work(measure)


def _measure_llama(ll: Any, context: Any, prompts: list[list[int]]) -> Speed:
    batch = ll.llama_batch_init(512, 0, 1)

    def decode(tokens: Sequence[tuple[int, int, int]], with_logits: bool) -> None:
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = with_logits or i == len(tokens) - 1
        if ll.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        ll.llama_synchronize(context)

    begun = time.perf_counter()
    for sequence, prompt in enumerate(prompts):
        decode([(t, i, sequence) for i, t in enumerate(prompt)], with_logits=False)
    prefilled = time.perf_counter()
    for step in range(OUTPUT):
        rows = [(p[step], PROMPT + step, sequence) for sequence, p in enumerate(prompts)]
        decode(rows, with_logits=True)
    done = time.perf_counter()
    ll.llama_batch_free(batch)
    count = len(prompts)
    return Speed(count * PROMPT / (prefilled - begun), count * OUTPUT / (done - prefilled))


def q4_0(ll: Any) -> Path:
    """Return the default model requantised to Q4_0, made once beside it."""
    from trnc.checkpoint.source import resolve

    original = resolve("smollm2-135m").path
    path = original.with_name("bench-smollm2-135m-q4_0.gguf")
    if not path.exists():
        params = ll.llama_model_quantize_default_params()
        params.ftype = ll.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        partial = path.with_suffix(".part")
        if ll.llama_model_quantize(str(original).encode(), str(partial).encode(), params):
            raise SystemExit("llama.cpp could not requantise the model to Q4_0")
        partial.rename(path)
    return path


if __name__ == "__main__":
    app()
