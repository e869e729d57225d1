"""The lock on disk, its comparison, and what a reviewer is told."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from trnc.equiv.lock import (
    PresetGraphs,
    StageCall,
    StageText,
    VariantGraphs,
    compare,
    read_lock,
    read_revision,
    write_lock,
)
from trnc.equiv.report import format_diff
from trnc.errors import TrncError


def stage(op: str, rows: int = 4, torch: str = "2.13.0") -> str:
    return (
        f"trnc-graph 1\n# torch {torch}\ninput $0: f32[{rows}, 8]\n"
        f"%0: f32[{rows}, 8] = aten.{op}.default($0)\n"
        f"%1: f32[{rows}, 8] = aten.neg.default(%0)\noutput %1\n"
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def preset(
    variants: dict[str, list[tuple[str, str, int]]],
    name: str = "default",
    wiring: str = "",
    sources: dict[int, str] | None = None,
) -> PresetGraphs:
    """Variants as lists of (kind, text, repeat)."""
    calls = {
        variant: tuple(StageCall(kind, digest(text), repeat) for kind, text, repeat in stages)
        for variant, stages in variants.items()
    }
    return PresetGraphs(
        model="tiny",
        preset=name,
        variants=tuple(VariantGraphs(v, c, wiring) for v, c in calls.items()),
        stages={
            digest(text): StageText(kind, text, sources or {})
            for stages in variants.values()
            for kind, text, _ in stages
        },
    )


def variants(layer: str = "relu") -> dict[str, list[tuple[str, str, int]]]:
    return {
        "decode-1/greedy": [
            ("embed", stage("exp", 1), 1),
            ("layer", stage(layer, 1), 30),
            ("greedy", stage("abs", 1), 1),
        ],
        "decode-4/greedy": [("embed", stage("exp"), 1), ("layer", stage(layer), 30)],
    }


def test_a_lock_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    presets = (preset(variants(), "batch8"), preset(variants("tanh"), wiring="0123"))
    write_lock(tmp_path, presets)
    assert read_lock(tmp_path) == presets
    assert not compare(read_lock(tmp_path), presets)


def test_the_files_are_short_and_name_each_stage_once(tmp_path: Path) -> None:
    write_lock(tmp_path, [preset(variants()), preset(variants(), "batch8")])
    embed, layer = stage("exp"), stage("relu")
    lines = (tmp_path / "tiny" / "default.toml").read_text().splitlines()
    assert (
        f'"decode-4/greedy" = "embed-{digest(embed)[:16]} layer-{digest(layer)[:16]}*30"' in lines
    )
    assert len(lines) == 4
    assert len(list((tmp_path / "stages").iterdir())) == 5
    assert (tmp_path / "stages" / f"layer-{digest(layer)[:16]}.txt").read_text() == layer


def test_writing_removes_stale_presets_and_stages_and_keeps_other_files(tmp_path: Path) -> None:
    write_lock(tmp_path, [preset(variants()), preset(variants(), "batch8")])
    (tmp_path / "README.md").write_text("kept")
    write_lock(tmp_path, [preset(variants("tanh"))])
    assert [p.preset for p in read_lock(tmp_path)] == ["default"]
    assert len(list((tmp_path / "stages").iterdir())) == 5
    assert (tmp_path / "README.md").exists()
    assert not (tmp_path / "tiny" / "batch8.toml").exists()


def test_writing_the_same_lock_changes_no_byte(tmp_path: Path) -> None:
    write_lock(tmp_path / "a", [preset(variants()), preset(variants("tanh"), "batch8")])
    write_lock(tmp_path / "b", [preset(variants("tanh"), "batch8"), preset(variants())])
    write_lock(tmp_path / "b", [preset(variants("tanh"), "batch8"), preset(variants())])
    for path in (tmp_path / "a").rglob("*.*"):
        assert (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes() == path.read_bytes()


def test_an_edited_stage_file_is_refused(tmp_path: Path) -> None:
    write_lock(tmp_path, [preset(variants())])
    path = next((tmp_path / "stages").glob("layer-*"))
    path.write_text(path.read_text().replace("\n", "\r\n"), newline="")
    with pytest.raises(TrncError, match=f"{path.name}.*digest in its name"):
        read_lock(tmp_path)


@pytest.mark.parametrize("damage", ["remove a stage", "not toml", "no variants"])
def test_a_damaged_lock_names_the_file(tmp_path: Path, damage: str) -> None:
    write_lock(tmp_path, [preset(variants())])
    path = tmp_path / "tiny" / "default.toml"
    if damage == "remove a stage":
        next((tmp_path / "stages").glob("layer-*")).unlink()
    else:
        path.write_text("[" if damage == "not toml" else "x = 1")
    with pytest.raises(TrncError, match=r"default\.toml: not a graph lock"):
        read_lock(tmp_path)


def test_a_changed_stage_is_reported_with_its_variants_and_its_ops() -> None:
    before = variants()
    after = variants()
    after["decode-4/greedy"][1] = ("layer", stage("tanh"), 30)
    sources = {4: "trnc/models/llama.py:7"}
    report = format_diff(compare([preset(before)], [preset(after, sources=sources)]))
    old, new = (f"layer-{digest(stage(op))[:16]}" for op in ("relu", "tanh"))
    assert report.splitlines() == [
        "tiny/default: 1 of 2 variants changed",
        f"  decode-4/greedy: {old}*30 -> {new}*30",
        "",
        f"stage {old} -> {new}, in 1 variant: tiny/default decode-4/greedy",
        "    # torch 2.13.0",
        "    input $0: f32[4, 8]",
        "  - %0: f32[4, 8] = aten.relu.default($0)",
        "  + %0: f32[4, 8] = aten.tanh.default($0)    # trnc/models/llama.py:7",
        "    %1: f32[4, 8] = aten.neg.default(%0)",
        "    output %1",
    ]


def test_one_change_at_many_shapes_is_shown_once() -> None:
    report = format_diff(compare([preset(variants())], [preset(variants("tanh"))]))
    assert report.count("+ %0") == 1
    assert report.count("the same ops as in layer-") == 1
    assert "2 of 2 variants changed" in report


def test_changes_that_differ_in_an_edge_are_both_shown() -> None:
    def wired(first: str, second: str, rows: int) -> str:
        lines = stage("exp", rows).splitlines()
        lines.insert(5, f"%2: f32[{rows}, 8] = aten.stack.default([{first}, {second}])")
        return "\n".join([*lines[:-1], "output %2"]) + "\n"

    before = [wired("%0", "%1", 1), wired("%0", "%1", 4)]
    after = [wired("%1", "%0", 1), wired("%0", "$0", 4)]
    old, new = (
        preset({f"decode-{i}/greedy": [("layer", text, 1)] for i, text in enumerate(texts)})
        for texts in (before, after)
    )
    report = format_diff(compare([old], [new]))
    assert "+ %2: f32[1, 8] = aten.stack.default([%1, %0])" in report
    assert "+ %2: f32[4, 8] = aten.stack.default([%0, $0])" in report


def test_two_different_changes_are_both_shown() -> None:
    after = variants("tanh")
    after["decode-4/greedy"][1] = ("layer", stage("exp"), 30)
    report = format_diff(compare([preset(variants())], [preset(after)]))
    assert report.count("+ %0") == 2


def test_added_and_removed_presets_variants_and_calls_are_named() -> None:
    before, after = variants(), variants()
    after["decode-8/greedy"] = after.pop("decode-4/greedy")
    del after["decode-1/greedy"][2]
    after["decode-1/greedy"].insert(1, ("norm", stage("sin", 1), 2))
    diff = compare([preset(before), preset(before, "gone")], [preset(after), preset(after, "new")])
    report = format_diff(diff)
    norm, greedy = digest(stage("sin", 1))[:16], digest(stage("abs", 1))[:16]
    assert "tiny/gone: removed, 2 variants" in report
    assert "tiny/new: added, 2 variants" in report
    assert "  + decode-8/greedy" in report
    assert "  - decode-4/greedy" in report
    assert f"(none) -> norm-{norm}*2" in report
    assert f"greedy-{greedy} -> (none)" in report
    assert f"new stage norm-{norm}, 2 ops, in 1 variant:" in report
    assert f"removed stage greedy-{greedy}" in report


def test_another_number_of_calls_or_wiring_is_a_change() -> None:
    after = variants()
    after["decode-4/greedy"][1] = ("layer", stage("relu"), 29)
    report = format_diff(compare([preset(variants())], [preset(after)]))
    assert "*30 -> layer-" in report
    assert "\nstage" not in report
    rewired = compare([preset(variants(), wiring="a")], [preset(variants(), wiring="b")])
    assert format_diff(rewired).count("values bound to other inputs") == 2


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(repository), *identity, *arguments], check=True)


def test_locks_of_git_revisions_are_read(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for layer in ("relu", "tanh"):
        write_lock(tmp_path / "graphs", [preset(variants(layer))])
        git(tmp_path, "add", "graphs")
        git(tmp_path, "commit", "-q", "-m", layer)
    old, new = read_revision(tmp_path, "HEAD~1"), read_revision(tmp_path, "HEAD")
    assert new == read_lock(tmp_path / "graphs")
    assert old == (preset(variants("relu")),)
    assert "aten.tanh" in format_diff(compare(old, new))
    with pytest.raises(TrncError, match="revision 'nowhere'"):
        read_revision(tmp_path, "nowhere")
