"""Building and loading the program runner: the small C++ library that executes linked programs."""

from __future__ import annotations

from pathlib import Path

import torch

from trnc.ops import native

RUNNER_FILE = "libtrnc_runner.so"
_SOURCE = Path(__file__).with_name("runner.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread")


def runner_factors() -> dict[str, str]:
    """Everything that can change the bytes of the runner; comments do not count.

    It uses torch's C++ API, so it belongs to one version of torch; it has no code of a target.
    """
    return {
        "sources": native.source_digest([_SOURCE]),
        "flags": " ".join(_FLAGS),
        "compiler": native.compiler_version(),
        "torch": torch.__version__,
    }


def build_runner(out: Path) -> None:
    """Compile the runner into `out`. Raises CompileError with the compiler's message."""
    root = Path(torch.__file__).parent
    native.run_compiler(
        *_FLAGS,
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(_SOURCE),
        f"-L{root / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(out / RUNNER_FILE),
    )


def load_runner(folder: Path) -> None:
    """Load the runner of an artifact's folder; the kernels must have been loaded before."""
    torch.classes.load_library(str(folder / RUNNER_FILE))
