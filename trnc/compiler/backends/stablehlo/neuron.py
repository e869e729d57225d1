"""The call of AWS's compiler: one job per module, some at once, and what fails is never kept.

A job takes many GiB, so as many run as memory allows. A job that was killed (which is how the
machine ends one that takes too much) runs once more, alone. The logs of failures stay in the
store, in `logs/`. What is compiled is in the store at once, so a build that was stopped goes on
from there. Imports no jax: a Neuron host finishes a bundle without it.

Neuron's plugin for jax calls the same compiler itself; `environment` gives it the same flags.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from trnc.compiler.store import ArtifactKey, Store
from trnc.core import Step
from trnc.errors import CompileError
from trnc.presets import TrainiumOptions

COMPILER = "neuronx-cc"
NEFF_FILE = "model.neff"
LOG_FILE = "compile.log"
JOB_GIB = 16  # what one job is taken to need, at most

_KILLED = b"[F137]"  # 128 and the number of the signal


@dataclass(frozen=True, slots=True)
class Job:
    """One module to compile. `flags` are the compiler's, without paths; `ranks` is the mesh."""

    label: str
    hlo: Path
    flags: tuple[str, ...]
    target: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that failed: its status, where its log is, and whether something killed it."""

    label: str
    status: int
    log: Path
    killed: bool


def flags(options: TrainiumOptions, step: Step, target: str) -> tuple[str, ...]:
    """Return the compiler's flags for a kind of step, as the preset states them."""
    return ("--framework=XLA", f"--target={target}", *_model_flags(options, step))


def _model_flags(options: TrainiumOptions, step: Step) -> tuple[str, ...]:
    level = options.prefill_opt_level if step == "prefill" else options.decode_opt_level
    return (
        f"--model-type={options.model_type}",
        f"--auto-cast={options.auto_cast}",
        f"--lnc={options.lnc}",
        f"-O{level}",
    )


def environment(options: TrainiumOptions, step: Step, given: str) -> dict[str, str]:
    """Return the variables under which jax's plugin compiles a kind of step.

    `given` are the user's own NEURON_CC_FLAGS, which come last: the compiler takes the last one.
    """
    return {
        "NEURON_CC_FLAGS": " ".join((*_model_flags(options, step), *given.split())),
        "NEURON_LOGICAL_NC_CONFIG": str(options.lnc),
    }


def command(job: Job, hlo: str, neff: str, log: str) -> list[str]:
    """Return the command line of a job, with these paths."""
    return [COMPILER, "compile", hlo, *job.flags, "--output", neff, "--logfile", log]


def compiler_version() -> str | None:
    """Return what `neuronx-cc --version` says, or None where there is none."""
    if shutil.which(COMPILER) is None:
        return None
    done = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=False)
    said = (done.stdout or done.stderr).strip()
    if done.returncode != 0 or not said:
        raise CompileError(f"{COMPILER} --version failed: {said or 'it says nothing'}")
    return said.splitlines()[0]


def neff_key(job: Job, version: str) -> ArtifactKey:
    """The key of a compiled module: its bytes, the flags, the mesh and the compiler.

    The number of ranks is a factor of its own, beside the replica groups in the module.
    """
    factors = {
        "hlo": hashlib.sha256(job.hlo.read_bytes()).hexdigest(),
        "flags": " ".join(job.flags),
        "target": job.target,
        "ranks": str(job.ranks),
        "compiler": version,
    }
    return ArtifactKey.of("neff", factors)


def job_limit(jobs: int, free_bytes: int, job_gib: int = JOB_GIB) -> int:
    """Return how many jobs may run at once; one may in any case."""
    return max(1, min(jobs, free_bytes // (job_gib << 30)))


def compile_all(
    jobs: Sequence[Job],
    *,
    version: str,
    store: Store,
    workers: int,
    report: Callable[[int, int, str], None],
) -> dict[str, ArtifactKey]:
    """Compile what the store lacks, `workers` at once; return the key of each label.

    Raises:
        CompileError: some failed, after all others have ended; names each one and its log.
    """
    failures: list[Failure] = []
    keys = {job.label: neff_key(job, version) for job in jobs}
    missing = [job for job in jobs if store.get(keys[job.label]) is None]
    ended = enumerate(_run_all(missing, keys, store, workers), start=1)
    for done, (job, failure) in ended:
        failures += [failure] if failure is not None else []
        report(done, len(missing), job.label + (" failed" if failure is not None else ""))
    if failures:
        lines = [f"{f.label}: status {f.status}, its log is {f.log}" for f in failures]
        count = f"{len(failures)} of {len(missing)} modules"
        raise CompileError(
            f"{COMPILER} failed for {count}; the others are kept, and the same command goes on from"
            " here:\n" + "\n".join(lines)
        )
    return keys


def _run_all(
    jobs: Sequence[Job], keys: dict[str, ArtifactKey], store: Store, workers: int
) -> Iterator[tuple[Job, Failure | None]]:
    """Yield each job as it ends. One that was killed runs again when nothing else does."""
    killed: list[Job] = []
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[Failure | None], Job] = {
            pool.submit(_compile, job, keys[job.label], store): job for job in jobs
        }
        try:
            while running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    job, failure = running.pop(future), future.result()
                    if failure is not None and failure.killed:
                        killed.append(job)
                    else:
                        yield job, failure
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for job in killed:
        yield job, _compile(job, keys[job.label], store)


class _FailedError(Exception):
    """Carries a failure out of a build, so that the store keeps nothing."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def _compile(job: Job, key: ArtifactKey, store: Store) -> Failure | None:
    try:
        store.get_or_build(key, lambda out: _build(job, key, store.root / "logs", out))
    except _FailedError as failed:
        return failed.failure
    return None


def _build(job: Job, key: ArtifactKey, logs: Path, out: Path) -> None:
    neff, log = out / NEFF_FILE, out / LOG_FILE
    with log.open("wb") as file:
        line = command(job, str(job.hlo), str(neff), str(out / "neuronx.log"))
        done = subprocess.run(line, cwd=out, stdout=file, stderr=subprocess.STDOUT, check=False)
    written = neff.is_file() and neff.stat().st_size > 0
    if done.returncode != 0 or not written:
        logs.mkdir(parents=True, exist_ok=True)
        kept = logs / f"{key.id}.log"
        said = b"\n".join(p.read_bytes() for p in (log, out / "neuronx.log") if p.is_file())
        kept.write_bytes(" ".join(line).encode() + b"\n" + said)
        # The compiler is a driver of processes: where one of them is killed, it only says so.
        killed = done.returncode < 0 or _KILLED in said
        raise _FailedError(Failure(job.label, done.returncode or 1, kept, killed))
    for path in out.iterdir():  # the artifact is the NEFF and its log, not the compiler's workspace
        if path.name not in (NEFF_FILE, LOG_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
