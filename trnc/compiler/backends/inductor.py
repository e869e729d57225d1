"""The inductor backend: one stage graph to one shared library, with AOTInductor.

Our operators stay opaque calls in the compiled stage; Inductor generates what lies between them.
Its code is compiled single-threaded: the work that is worth a second core is in our operators,
which bring their own thread pool, and two pools on the same cores would only fight.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from trnc.compiler.backends.lowering import DIRECT_CALLS, fuse, lowering_digest
from trnc.compiler.manifest import STAGE_FILE
from trnc.compiler.trace import without_warnings
from trnc.errors import CompileError
from trnc.ops.native import Target, kernel_factors, missing_features

WRAPPER_LEVEL = "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"

# Vector width in bits and architecture level of the code that Inductor generates for a target.
_CODEGEN = {
    "amx": (512, "x86-64-v4"),
    "avx512": (512, "x86-64-v4"),
    "avxvnni": (256, "x86-64-v3"),
    "avx2": (256, "x86-64-v3"),
    "generic": (0, ""),
}


def options(target: Target) -> dict[str, Any]:
    """Inductor options that shape the compiled bytes; all of them are factors of the artifact."""
    simd_bits, march = _CODEGEN[target.name]
    return {
        "aot_inductor.package": False,
        "cpp.threads": 1,
        "cpp.simdlen": simd_bits,
        "cpp.march": march,
        # How the calls between kernels are compiled, with Inductor's own variable.
        "aot_inductor.compile_wrapper_opt_level": os.environ.get(WRAPPER_LEVEL, "O1"),
    }


def stage_factors(graph_digest: str, target: Target) -> dict[str, str]:
    """Everything that can change the bytes of a compiled stage."""
    return {
        "digest": graph_digest,
        "lowering": lowering_digest(),
        "backend": "inductor",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "compiler": kernel_factors(target)["compiler"],
        "target": target.name,
        "options": json.dumps(options(target), sort_keys=True),
    }


def obstacle(target: Target) -> str | None:
    """Say why this machine cannot compile stages for a target; None if it can.

    Inductor generates vector code only for widths that the processor at hand has. The kernels'
    compiler has no such limit.
    """
    width, level = _CODEGEN[target.name]
    needed = {512: ("avx512f", "avx512bw", "avx512dq", "avx512vl"), 256: ("avx2", "fma")}
    lacking = [f for f in needed.get(width, ()) if f in missing_features(target)]
    if not lacking:
        return None
    return (
        f"Inductor generates {level} code only on a processor that has it; this one lacks"
        f" {', '.join(lacking)}"
    )


def compile_stage(program: ExportedProgram, target: Target, out: Path) -> None:
    """Compile a stage into `out/stage.so` and, for its custom operators, `out/stage.json`.

    Raises:
        CompileError: Inductor or the C++ compiler failed; the message holds the reason.
    """
    from torch._inductor import aot_compile, config

    example = tuple(program.example_inputs[0]) if program.example_inputs else ()
    scratch = out / "scratch"
    scratch.mkdir()
    settings = options(target) | {
        "aot_inductor.output_path": str(scratch / STAGE_FILE),
        "aot_inductor.custom_ops_to_c_shims": {op: [c] for op, c in DIRECT_CALLS.items()},
    }
    if hasattr(config.aot_inductor, "enable_line_tables"):  # not in every torch that we support
        settings["aot_inductor.enable_line_tables"] = False
    module = program.module()
    fuse(module)
    try:
        with without_warnings():
            aot_compile(module, example, options=settings)
    except Exception as error:
        raise CompileError(f"AOTInductor failed: {error}") from error
    _keep_only_outputs(scratch, out)


def _keep_only_outputs(scratch: Path, out: Path) -> None:
    """Move the library and its operator list to `out`; sources and logs are not the artifact.

    Inductor names the operator list after the source's hash; the runner looks for it beside the
    library, under the library's own name.
    """
    os.replace(scratch / STAGE_FILE, out / STAGE_FILE)
    for operators in scratch.glob("*.wrapper.json"):  # none where a stage calls none of ours
        os.replace(operators, (out / STAGE_FILE).with_suffix(".json"))
    shutil.rmtree(scratch)
