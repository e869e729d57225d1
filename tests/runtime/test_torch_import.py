"""A torch imported for serving is the whole torch again before anything is traced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models.tiny import write_mixed_gguf

TRACE = """
import sys
from trnc.runtime.torch_import import complete_torch, import_torch
if sys.argv[2] == "short":
    import_torch()
    import_torch()
    assert "torch._meta_registrations" in sys.modules and "torch._prims" not in sys.modules
    complete_torch()
    complete_torch()
    import torch
    assert torch._meta_registrations.__spec__ is not None and "torch._prims" in sys.modules
from pathlib import Path
from trnc.compiler.compile import plan_build
from trnc.compiler.store import Store
from trnc.ops.native import detect_target
from trnc.presets import load_preset
from trnc.runtime.start import open_model, program_config
config = program_config(open_model(sys.argv[1], report=print), load_preset("default"), "inductor")
store = Store(root=Path(sys.argv[1] + ".store"), log=print)
plan = plan_build(config, target=detect_target(), store=store, report=lambda *_: None)
print(*(job.key.id for job in plan.jobs))
"""


def test_graphs_do_not_depend_on_how_torch_was_imported(tmp_path: Path) -> None:
    model = str(write_mixed_gguf(tmp_path / "mixed.gguf"))
    ids = [
        subprocess.run(
            [sys.executable, "-c", TRACE, model, how], check=True, capture_output=True, text=True
        ).stdout
        for how in ("short", "whole")
    ]
    assert len(ids[0].split()) > 5
    assert ids[0] == ids[1]
