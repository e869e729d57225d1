"""A build host records what it could not compile for another target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.compiler.tiny_stages import SPECS
from tests.models.tiny import PRESET
from trnc.compiler.backends import inductor
from trnc.compiler.compile import BuildPlan, Job, build_possible, obstacles, stage_key
from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import Store
from trnc.compiler.unfinished import Unfinished, read_unfinished, write_unfinished
from trnc.models.stage import WeightFormats
from trnc.ops.native import find_target, missing_features

TARGET = find_target("avx512", "")
SPEC = SPECS["sample"]
CONFIG = ProgramConfig(SPEC.model, WeightFormats("f32", "f32", ()), PRESET)
JOB = Job(key=stage_key("abc", TARGET), label="sample", spec=SPEC)
PLAN = BuildPlan(CONFIG, TARGET, {}, {}, (JOB,), (JOB,))


@pytest.fixture
def other_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "missing_features", lambda target: target.needs)


def test_a_processor_lacks_what_its_cpuinfo_does_not_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx2 fma f16c avx512f\n")
    assert missing_features(find_target("avx2", ""), cpuinfo) == frozenset()
    assert "avx512bw" in missing_features(TARGET, cpuinfo)


@pytest.mark.usefixtures("other_processor")
def test_stages_are_left_and_recorded_and_the_reason_names_the_features(tmp_path: Path) -> None:
    store = Store(root=tmp_path, log=print)
    left = build_possible(PLAN, store=store, workers=1, report=lambda *_: None)
    assert left == obstacles(PLAN)
    (item,) = left
    assert (item.id, item.label) == (JOB.key.id, "sample")
    assert "x86-64-v4" in item.reason
    assert "avx512f" in item.reason
    assert read_unfinished(tmp_path) == {item.id: item}
    assert store.entries() == []


@pytest.mark.usefixtures("other_processor")
def test_plain_code_and_kernels_are_compiled_anywhere() -> None:
    assert inductor.obstacle(find_target("generic", "")) is None
    kernels = replace(JOB, label="kernels", spec=None)
    assert obstacles(replace(PLAN, missing=(kernels,))) == ()


def test_a_finished_build_removes_its_record_and_no_other(tmp_path: Path) -> None:
    item = Unfinished("a", "layer", "why")
    write_unfinished(tmp_path, "amx", "default", (item,))
    write_unfinished(tmp_path, "amx", "batch8", (replace(item, id="b"),))
    write_unfinished(tmp_path, "amx", "default", ())
    assert list(read_unfinished(tmp_path)) == ["b"]
    assert read_unfinished(tmp_path / "none") == {}
