from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.weights import packed_weight, random_rows, random_weight
from trnc.errors import CompileError, ConfigError
from trnc.ops import native
from trnc.ops.library import reference_mode
from trnc.ops.linear import linear
from trnc.ops.packing import pack

ROOT = Path(__file__).parents[2]
_CPU = native._cpu_features(Path("/proc/cpuinfo"))
RUNNABLE = [target for target in native.TARGETS if target.needs <= _CPU]


@pytest.fixture(scope="module")
def by_target(
    native_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Tensor]]:
    """The results of run_target.py for every target that this machine can run."""
    results = {}
    for target in RUNNABLE:
        folder = tmp_path_factory.mktemp(target.name)
        best = target is native.detect_target()
        library = native_library if best else native.build_kernels(target, folder)
        command = [sys.executable, "-m", "tests.ops.run_target", str(library), str(folder / "out")]
        subprocess.run(command, cwd=ROOT, check=True)
        results[target.name] = torch.load(folder / "out")
    return results


@pytest.mark.timeout(900)  # builds every target
def test_targets_agree(by_target: dict[str, dict[str, Tensor]]) -> None:
    """Vector targets bit for bit; the plain one, whose fma rounds twice, to f32 rounding.

    Integer sums are exact everywhere, so the bound needs no term for the quantised activations.
    Weights of int8 attention are rounded to 15 bits after an exp, whose last bit may move one by a
    step. A matrix unit rounds rows for bf16 weights to 17 bits and adds up in its own order.
    """
    best, *others = by_target
    for other in others:
        for name, wanted in by_target[best].items():
            got = by_target[other][name]
            by_unit = best == "amx" and name == "linear bf16"
            if other == "generic" or by_unit:
                scale = wanted.abs().amax(dim=1, keepdim=True)
                bound = 3e-5 if by_unit or name.startswith("attention torch.int8") else 3e-6
                assert ((got - wanted).abs() <= bound * scale).all(), name
            else:
                assert torch.equal(got, wanted), f"{other} differs from {best} in {name}"


def cpuinfo(path: Path, flags: str) -> Path:
    file = path / "cpuinfo"
    file.write_text(f"processor : 0\nflags\t\t: {flags}\nbugs\t: x\n")
    return file


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx512f avx512bw avx512dq avx512vl avx512_vnni avx2 fma f16c", "avx512"),
        ("fpu avx512f avx512bw avx512dq avx512vl avx2 fma f16c", "avx2"),
        ("fpu avx2 fma", "generic"),
        ("", "generic"),
    ],
)
def test_the_best_target_is_detected(
    flags: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRNC_TARGET", raising=False)
    assert native.detect_target(cpuinfo(tmp_path, flags)).name == name


def test_a_target_can_be_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = cpuinfo(tmp_path, "avx2 fma f16c")
    monkeypatch.setenv("TRNC_TARGET", "generic")
    assert native.detect_target(info).name == "generic"
    monkeypatch.setenv("TRNC_TARGET", "avx521")
    with pytest.raises(ConfigError, match=r"TRNC_TARGET=avx521.*Did you mean 'avx512'"):
        native.detect_target(info)
    monkeypatch.setenv("TRNC_TARGET", "avx512")
    with pytest.raises(ConfigError, match=r"needs avx512_vnni, .* which this processor lacks"):
        native.detect_target(info)


def test_factors_see_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = native.TARGETS[-1]
    before = native.kernel_factors(target)
    sources = tmp_path / "kernels"
    shutil.copytree(native.SOURCES, sources)
    monkeypatch.setattr(native, "SOURCES", sources)
    file = sources / "norm.cpp"
    code = file.read_text()
    file.write_text("/* a\n comment */\n\n" + code.replace("  const", "\t  const") + "// end\n")
    assert native.kernel_factors(target) == before
    file.write_text(code.replace("kGrain = 16384", "kGrain = 16385", 1))
    after = native.kernel_factors(target)
    assert {name for name in after if after[name] != before[name]} == {"sources"}
    other = native.kernel_factors(native.TARGETS[0])
    assert {name for name in other if other[name] != after[name]} == {"target", "flags"}


def test_a_missing_compiler_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"no-such-compiler was not found; install g\+\+"):
        native.build_kernels(native.TARGETS[-1], tmp_path)
    with pytest.raises(CompileError, match=r"no-such-compiler"):
        native.kernel_factors(native.TARGETS[-1])


def test_a_compile_failure_holds_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.cpp").write_text("int x = nothing;\n")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    with pytest.raises(CompileError, match=r"broken.cpp.*(\n.*)*nothing"):
        native.build_kernels(native.TARGETS[-1], tmp_path / "out")


def test_threads_come_from_the_variable_or_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.delenv("TRNC_THREADS", raising=False)
    assert native.default_threads(tmp_path) == 6
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert native.default_threads(tmp_path) == 6
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert native.default_threads(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert native.default_threads(tmp_path) == 1
    monkeypatch.setenv("TRNC_THREADS", "4")
    assert native.default_threads(tmp_path) == 4
    for bad in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("TRNC_THREADS", bad)
        with pytest.raises(ConfigError, match=r"TRNC_THREADS"):
            native.default_threads(tmp_path)


def test_version_1_quotas_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.delenv("TRNC_THREADS", raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert native.default_threads(tmp_path) == 6
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000\n")
    assert native.default_threads(tmp_path) == 3


def test_loading_again_changes_nothing(native_library: Path) -> None:
    native.load_kernels(native_library)
    native.set_num_threads(3)
    assert native.num_threads() == 3
    with pytest.raises(RuntimeError, match=r"must be at least 1, got 0"):
        native.set_num_threads(0)
    native.load_kernels(native_library)
    assert native.num_threads() == native.default_threads()


def test_calls_from_several_threads_do_not_mix(native_library: Path) -> None:
    weight = packed_weight("i4g32", 480, 256)
    rows = [random_rows(16, 256, seed) for seed in range(4)]
    wanted = [linear(x, weight, None, "i4g32", 480) for x in rows]
    wrong = []

    def work(index: int) -> None:
        out = [linear(rows[index], weight, None, "i4g32", 480) for _ in range(200)]
        wrong.extend(index for each in out if not torch.equal(each, wanted[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_computes_alone(native_library: Path) -> None:
    """The pool's threads do not survive a fork; their share must not be waited for."""
    weight, x = packed_weight("i4g32", 480, 256), random_rows(16, 256)
    wanted = linear(x, weight, None, "i4g32", 480).numpy().tobytes()
    child = os.fork()
    if child == 0:
        same = linear(x, weight, None, "i4g32", 480).numpy().tobytes() == wanted
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_a_library_the_references_answer() -> None:
    script = (
        "import torch, trnc.ops as ops\n"
        "from tests.ops.weights import *\n"
        "x, w = random_rows(3, 64), random_weight('i4g32', 20, 64)\n"
        "out = ops.linear(x, ops.pack(w, 'i4g32'), None, 'i4g32', 20)\n"
        "assert torch.equal(out, x @ w.dequantize().T)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_reference_mode_bypasses_the_library(native_library: Path) -> None:
    logical, x = random_weight("i4g32", 20, 64), random_rows(3, 64)
    weight = pack(logical, "i4g32")
    exact = x @ logical.dequantize().T
    assert not torch.equal(linear(x, weight, None, "i4g32", 20), exact)
    with reference_mode():
        assert torch.equal(linear(x, weight, None, "i4g32", 20), exact)
