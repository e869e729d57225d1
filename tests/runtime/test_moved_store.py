"""A store that one machine packed serves on another: other folder, home and user, no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import PRESET
from tests.runtime.serving import alone
from trnc.compiler.archive import pack, unpack
from trnc.compiler.backends.inductor import WRAPPER_LEVEL
from trnc.compiler.store import Store
from trnc.compiler.tier import VARIABLE, open_store
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.start import StartOptions, require_cache, start_executor

REQUEST = Submit("it", tuple(range(3, 40)), SamplingParams(logprobs=3), 6)
NOBODY = 65534


def answer(executor: ProgramExecutor) -> Any:
    tokens, logprobs, _ = alone(executor, REQUEST)
    return [tokens, [found.logprob for found in logprobs]]


def serve() -> None:
    """What the other process does: become the other user, start, and print an answer."""
    job = json.load(sys.stdin)
    if job["user"] is not None:
        os.setgroups([])
        os.setgid(job["user"])
        os.setuid(job["user"])
    store = open_store(Path(job["store"]), print)
    if job["pack"]:
        assert unpack(store, Path(job["pack"])).refused == ()
    options = StartOptions(job["model"], PRESET, "inductor", store.root)
    executor = start_executor(options, require_cache, print)[0]
    print(json.dumps([answer(executor), executor.compiles_after_ready(), os.getuid()]))


def others_can_run_this() -> bool:
    """Whether another user may enter every folder that Python and trnc lie in."""
    needed = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parent)
    return all(folder.stat().st_mode & 1 for path in needed for folder in (path, *path.parents))


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder that another user may enter and write to."""
    with tempfile.TemporaryDirectory(prefix="elsewhere") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def answer_there(elsewhere: Path, environment: dict[str, str], **job: Any) -> Any:
    (elsewhere / "home").mkdir(mode=0o777)
    (elsewhere / "home").chmod(0o777)
    own = {"HOME": str(elsewhere / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    own |= {WRAPPER_LEVEL: os.environ[WRAPPER_LEVEL]}
    done = subprocess.run(
        [sys.executable, "-c", "from tests.runtime.test_moved_store import serve; serve()"],
        cwd=elsewhere,
        env=own | {"PATH": "/nowhere", "CXX": "/nowhere/c++"} | environment,
        input=json.dumps(job | {"store": str(elsewhere / "home" / "store")}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pack_serves_another_user_in_another_folder_without_a_compiler(
    quantized_options: StartOptions, quantized: ProgramExecutor, elsewhere: Path
) -> None:
    pack(Store(root=quantized_options.store, log=print), elsewhere / "pack.tgz")
    (elsewhere / "pack.tgz").chmod(0o644)
    model = shutil.copy(quantized_options.model, elsewhere / "moved.gguf")
    user = NOBODY if os.getuid() == 0 and others_can_run_this() else None
    found = answer_there(
        elsewhere, {}, model=str(model), user=user, pack=str(elsewhere / "pack.tgz")
    )
    assert found == [answer(quantized), 0, os.getuid() if user is None else user]


def test_a_second_tier_behind_a_url_serves_an_empty_store_without_a_compiler(
    quantized_options: StartOptions, quantized: ProgramExecutor, elsewhere: Path
) -> None:
    tier = {VARIABLE: f"file://{quantized_options.store}"}
    found = answer_there(elsewhere, tier, model=quantized_options.model, user=None, pack="")
    assert found == [answer(quantized), 0, os.getuid()]
    copied = Store(root=elsewhere / "home" / "store", log=print)
    assert copied.verify() == []
    assert copied.entries()
