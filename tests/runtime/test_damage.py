"""Building a store: from damage, by two processes at once, and after one was killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.tiny import PRESET
from tests.runtime.serving import alone, compile_missing
from trnc.compiler.compile import BuildPlan, plan_build
from trnc.compiler.manifest import STAGE_FILE, manifest_key
from trnc.compiler.store import Store
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.errors import StoreError
from trnc.ops.native import detect_target
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.start import (
    StartOptions,
    open_model,
    program_config,
    require_cache,
    start_executor,
)

REQUEST = Submit("it", tuple(range(3, 40)), SamplingParams(logprobs=3), 6)
PRESET_TOML = f"""
description = "{PRESET.description}"
decode_rows = {list(PRESET.decode_rows)}
prefill_tokens = {list(PRESET.prefill_tokens)}
max_context = {PRESET.max_context}
page_size = {PRESET.page_size}
"""


class Copy:
    """A copy of the session's store, in which every artifact of one model is whole.

    Files are hard links: a process must not load a second copy of the kernels. `plan` is of the
    session's store.
    """

    def __init__(self, options: StartOptions, plan: BuildPlan, folder: Path) -> None:
        self.root = folder / "store"
        for part in ("objects", "inductor"):  # the latter saves Inductor a look at the compiler
            shutil.copytree(options.store / part, self.root / part, copy_function=os.link)
        self.log: list[str] = []
        self.options = replace(options, store=self.root)
        self.store = Store(root=self.root, log=self.log.append)
        self.config = plan.config
        self.ids = {job.label: job.key.id for job in plan.jobs}

    @property
    def manifest(self) -> Path:
        found = self.store.get(manifest_key(self.config, detect_target()))
        assert found is not None
        return found

    def stage(self, label: str) -> Path:
        return self.root / "objects" / self.ids[label][:2] / self.ids[label] / STAGE_FILE

    def forget(self, *labels: str) -> None:
        """Remove the manifest and some artifacts, as if they had never been built."""
        shutil.rmtree(self.manifest)
        for label in labels:
            shutil.rmtree(self.stage(label).parent)

    def created(self) -> dict[str, str]:
        return {entry.key.id: str(entry.created) for entry in self.store.entries()}

    def start(self, compiler: Callable[..., object] = compile_missing) -> ProgramExecutor:
        return start_executor(self.options, compiler, self.log.append)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan(quantized_options: StartOptions, quantized: ProgramExecutor) -> BuildPlan:
    options = quantized_options
    config = program_config(
        open_model(options.model, report=print), options.preset, options.backend
    )
    store = Store(root=options.store, log=print)
    plan = plan_build(config, target=detect_target(), store=store, report=lambda *_: None)
    assert plan.missing == ()
    return plan


@pytest.fixture
def copy(quantized_options: StartOptions, plan: BuildPlan, tmp_path: Path) -> Copy:
    return Copy(quantized_options, plan, tmp_path)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the copy without changing what it is linked to."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def never(*_: object) -> None:
    pytest.fail("nothing is missing, but the compiler was called")


def test_a_whole_store_starts_without_a_compiler(copy: Copy) -> None:
    executor = copy.start(never)
    executor.close()
    assert copy.log == []


def test_damaged_stages_are_refused_or_rebuilt_and_nothing_else_is(
    copy: Copy, quantized: ProgramExecutor
) -> None:
    rewrite(copy.stage("greedy"), flipped)
    rewrite(copy.stage("logit_bias"), lambda data: data[:-100])
    copy.stage("logprobs").unlink()
    before = copy.created()
    with pytest.raises(StoreError, match="--require-cache: not every artifact of preset 'tiny'"):
        copy.start(require_cache)
    executor = copy.start()
    try:
        assert alone(executor, REQUEST) == alone(quantized, REQUEST)
    finally:
        executor.close()
    assert executor.compiles_after_ready() == 0
    damaged = {copy.ids[label] for label in ("greedy", "logit_bias", "logprobs")}
    after = copy.created()
    assert after.keys() == before.keys()
    assert {id for id in after if after[id] != before[id]} == damaged
    for reason in (
        "the checksum of stage.so differs",
        "stage.so has",
        "stage.so is missing",
    ):
        assert sum(reason in line for line in copy.log) == 1, copy.log
    assert len(copy.log) == 3
    assert copy.store.verify() == []


def test_a_damaged_manifest_is_written_again_and_no_stage_is_compiled(copy: Copy) -> None:
    rewrite(copy.manifest / "manifest.json", flipped)
    before = copy.created()
    copy.start().close()
    after = copy.created()
    assert [id for id in after if after[id] != before[id]] == [
        manifest_key(copy.config, detect_target()).id
    ]
    assert len(copy.log) == 1
    assert "set aside a damaged artifact" in copy.log[0]


def trnc_compile(copy: Copy, **environment: str) -> subprocess.Popen[str]:
    """Start `trnc compile` for the copy's model and store."""
    preset = copy.root.parent / "tiny.toml"
    preset.write_text(PRESET_TOML)
    command = ("compile", "--model", copy.options.model, "--preset", str(preset))
    main = "from trnc.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", main, *command, "--store", str(copy.root), "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def logging_compiler(folder: Path, log: Path) -> dict[str, str]:
    """The environment of a C++ compiler that notes how it is called.

    It keeps its name: under another, Inductor would look at it and precompile its headers again.
    """
    real = os.environ.get("CXX") or "g++"
    compiler = folder / "bin" / Path(real).name
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {shutil.which(real)} "$@"\n')
    compiler.chmod(0o755)
    path = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "CXX": compiler.name}


def test_two_processes_build_an_artifact_once(copy: Copy, tmp_path: Path) -> None:
    copy.forget("greedy")
    log = tmp_path / "log"
    logging = logging_compiler(tmp_path, log)
    both = [trnc_compile(copy, **logging) for _ in range(2)]
    said = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert copy.store.verify() == []
    links = (line for line in log.read_text().splitlines() if "-shared" in line)
    built = [re.search(r"building/(\w{64})/", line) for line in links]
    assert [match[1] for match in built if match] == [copy.ids["greedy"]]


def test_after_a_kill_the_next_compile_succeeds(copy: Copy, quantized: ProgramExecutor) -> None:
    # Each of the two workers finishes the artifact that it is at, and takes no other.
    copy.forget("greedy", "logit_bias", "logprobs")
    killed = trnc_compile(copy)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("compiled 1/3"):
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate(timeout=280)  # until its workers have ended, too
    assert killed.returncode == -signal.SIGKILL
    assert copy.store.get(manifest_key(copy.config, detect_target())) is None
    executor = copy.start()
    try:
        assert alone(executor, REQUEST) == alone(quantized, REQUEST)
    finally:
        executor.close()
    assert copy.log == []
    assert copy.store.verify() == []
