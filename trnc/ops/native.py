"""Building and loading the native kernels: one shared library for one target instruction set.

The library is built from `trnc/ops/kernels` with the C++ compiler of the machine. Nothing is cached
here: the artifact store keeps the result, keyed by `kernel_factors`. Loading it registers the CPU
kernels of every op and sizes their thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trnc.errors import CompileError, ConfigError, nearest

SOURCES = Path(__file__).parent / "kernels"
LIBRARY_NAME = "libtrnc_kernels.so"

_COMMON_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # A kernel's bits must not depend on which multiplications the compiler happens to fuse.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that the binary must run on
)


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set that kernels can be built for.

    `flags` are the compiler's; `needs` are the processor's feature names as /proc/cpuinfo has them.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


# Features whose flag is not their name without underscores.
_FLAGS = {"amx_tile": "amx-tile", "amx_int8": "amx-int8", "amx_bf16": "amx-bf16"}


def _x86(name: str, *features: str) -> Target:
    flags = tuple("-m" + _FLAGS.get(feature, feature.replace("_", "")) for feature in features)
    return Target(name, flags, frozenset(features))


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c")

# Best first.
TARGETS = (
    _x86("amx", *_AVX512, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    _x86("avx512", *_AVX512),
    _x86("avxvnni", "avx2", "fma", "f16c", "avx_vnni"),
    _x86("avx2", "avx2", "fma", "f16c"),
    Target("generic", (), frozenset()),
)


def detect_target(cpuinfo: Path = Path("/proc/cpuinfo")) -> Target:
    """Return the best target for this processor, or the one that TRNC_TARGET names.

    Raises ConfigError where TRNC_TARGET is unknown or this processor cannot run it.
    """
    forced = os.environ.get("TRNC_TARGET")
    if not forced:
        features = _cpu_features(cpuinfo)
        return next(target for target in TARGETS if target.needs <= features)
    target = find_target(forced, "TRNC_TARGET=")
    if missing := missing_features(target, cpuinfo):
        raise ConfigError(
            f"TRNC_TARGET={forced} needs {', '.join(sorted(missing))}, which this processor lacks; "
            "unset it to use the best target"
        )
    return target


def find_target(name: str, flag: str) -> Target:
    """Return the target of a name; `flag` is what gave it, for the ConfigError of a wrong one."""
    by_name = {target.name: target for target in TARGETS}
    if name not in by_name:
        known = ", ".join(by_name)
        raise ConfigError(f"{flag}{name} is not a target ({known}).{nearest(name, by_name)}")
    return by_name[name]


def missing_features(target: Target, cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what of a target's features this processor lacks."""
    return target.needs - _cpu_features(cpuinfo)


def _cpu_features(cpuinfo: Path) -> frozenset[str]:
    if not cpuinfo.exists():
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()


def kernel_factors(target: Target) -> dict[str, str]:
    """Return everything that can change the bytes of `build_kernels(target)`, by name.

    Comments and white space of the sources do not count.
    """
    return {
        "sources": source_digest(p for p in SOURCES.iterdir() if p.suffix in (".h", ".cpp")),
        "target": target.name,
        "flags": " ".join((*_COMMON_FLAGS, *target.flags)),
        "compiler": compiler_version(),
        "torch": torch.__version__,
    }


def source_digest(paths: Iterable[Path]) -> str:
    """Return a sha-256 of C++ files; comments and white space do not count."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0{_code_only(path.read_text())}\0".encode())
    return digest.hexdigest()


def compiler_version() -> str:
    """Return the first line of the C++ compiler's --version; CompileError where there is none."""
    return run_compiler("--version").splitlines()[0]


def _code_only(source: str) -> str:
    comment_or_string = r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/'
    code = re.sub(
        comment_or_string,
        lambda match: match.group() if match.group().startswith('"') else " ",
        source,
        flags=re.DOTALL,
    )
    # A directive ends with its line, so line ends stay; everything else is one space.
    lines = (" ".join(line.split()) for line in code.splitlines())
    return "\n".join(line for line in lines if line)


def build_kernels(target: Target, out_dir: Path) -> Path:
    """Compile the kernels for `target` into `out_dir` and return the shared library's path.

    Files are compiled in parallel. Raises CompileError with the compiler's message.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    torch_dir = Path(torch.__file__).parent
    includes = [f"-I{torch_dir / 'include'}"]
    sources = sorted(SOURCES.glob("*.cpp"))

    def compile_one(source: Path) -> str:
        output = str(out_dir / f"{source.stem}.o")
        run_compiler(*_COMMON_FLAGS, *target.flags, *includes, "-c", str(source), "-o", output)
        return output

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    library = out_dir / LIBRARY_NAME
    libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    run_compiler("-shared", "-pthread", *objects, *libraries, "-o", str(library))
    for path in objects:
        Path(path).unlink()
    return library


def run_compiler(*arguments: str) -> str:
    """Run the C++ compiler ($CXX, else g++) and return what it printed.

    Raises CompileError with the compiler's message, or saying what to install.
    """
    command = [os.environ.get("CXX") or "g++", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CompileError(
            f"the C++ compiler {command[0]} was not found; install g++ 11 or later "
            "(Debian and Ubuntu: apt install g++), or name another one with CXX"
        ) from None
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def load_kernels(path: Path) -> None:
    """Register the kernels of the library at `path` and size their thread pool; idempotent.

    Its C entries become visible to the compiled stages that call them.
    """
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
    set_num_threads(default_threads())


def set_num_threads(n: int) -> None:
    """Use `n` >= 1 threads in kernels from now on. The library must be loaded."""
    torch.ops.trnc.set_num_threads(n)


def num_threads() -> int:
    """Return how many threads kernels use. The library must be loaded."""
    return int(torch.ops.trnc.num_threads())


def default_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return TRNC_THREADS, or the processors of the affinity mask limited by the cgroup's quota.

    Raises ConfigError where TRNC_THREADS is not a whole number of at least 1.
    """
    forced = os.environ.get("TRNC_THREADS")
    if forced:
        if not forced.isdecimal() or int(forced) < 1:
            raise ConfigError(f"TRNC_THREADS={forced} must be a whole number of at least 1")
        return int(forced)
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """Return the processors that the cgroup (version 2, else 1) may use, None where unlimited."""
    v2, v1 = root / "cpu.max", root / "cpu"
    if v2.exists():
        quota, period = v2.read_text().split()
    elif (v1 / "cpu.cfs_quota_us").exists():
        quota = (v1 / "cpu.cfs_quota_us").read_text().strip()
        period = (v1 / "cpu.cfs_period_us").read_text().strip()
    else:
        return None
    return None if quota in ("max", "-1") else float(quota) / float(period)
