"""A miss is explained by the nearest artifact and the factors that differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trnc.compiler.compile import kernels_key, runner_key, stage_key
from trnc.compiler.explain import Difference, explain_miss
from trnc.compiler.store import ArtifactKey, Store
from trnc.ops.native import detect_target


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(root=tmp_path / "store", log=lambda line: None)


def key(kind: str = "stage", **factors: str) -> ArtifactKey:
    return ArtifactKey.of(kind, {"digest": "g1", "target": "avx512", "torch": "2.13.0", **factors})


def add(store: Store, wanted: ArtifactKey) -> Path:
    return store.get_or_build(wanted, lambda folder: (folder / "a").write_bytes(b"data"))


def test_an_empty_store_says_what_to_run(store: Store) -> None:
    explanation = explain_miss(store, key())
    assert explanation.nearest is None
    assert "no stage at all: run `trnc compile`" in str(explanation)


def test_the_nearest_has_the_fewest_differences_and_is_the_newest_of_them(store: Store) -> None:
    far = key(torch="2.12.0", target="avx2")
    old, new = key(torch="2.11.0"), key(torch="2.12.0")
    for wanted in (old, new, far, key("kernels")):
        add(store, wanted)
    explanation = explain_miss(store, key())
    assert explanation.hit is None
    assert explanation.nearest is not None
    assert explanation.nearest.key == new
    (difference,) = explanation.differences
    assert (difference.name, difference.have, difference.want) == ("torch", "2.12.0", "2.13.0")
    text = str(explanation)
    assert "1 of 3 factors differ" in text
    assert "torch: have '2.12.0', want '2.13.0' (another torch compiled it: install" in text


def test_every_differing_factor_is_named_also_one_that_is_absent(store: Store) -> None:
    add(store, key(mesh="2"))
    explanation = explain_miss(store, key(digest="g2", target="avx2", note="x" * 200))
    assert [d.name for d in explanation.differences] == ["digest", "mesh", "note", "target"]
    text = str(explanation)
    assert "mesh: have '2', want absent" in text
    assert "note: have absent, want 'xxx" in text
    assert "x" * 100 not in text
    assert "tools/graph_equiv.py check" in text
    assert "no artifact of this graph exists, by any toolchain: compile it" in text


TEXT = "trnc-graph 1\n# torch 2.13.0\ninput $0: f32[4]\noutput $0\n"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_digest_that_another_torch_made_is_noise_and_torch_is_the_cause(store: Store) -> None:
    old = sha(TEXT.replace("2.13.0", "2.12.0"))
    add(store, key(digest=old, torch="2.12.0 0a1b"))
    add(store, key(digest=sha("another graph"), torch="2.13.0 9f"))
    wanted = key(digest=sha(TEXT), torch="2.13.0 9f")
    explanation = explain_miss(store, wanted, TEXT)
    assert explanation.nearest is not None
    assert explanation.nearest.key == key(digest=old, torch="2.12.0 0a1b")
    assert [d.name for d in explanation.causes] == ["torch"]
    assert "=> the hit comes back with torch '2.12.0 0a1b', or after" in str(explanation)
    assert "noise: the same graph, whose text names the torch" in str(explanation)
    assert [d.name for d in explain_miss(store, wanted).causes] == ["digest"]


def test_another_graph_of_the_same_toolchain_clears_the_toolchain(store: Store) -> None:
    add(store, key(digest="g2"))
    explanation = explain_miss(store, key(), TEXT)
    assert [d.name for d in explanation.causes] == ["digest"]
    assert "the toolchain is not the cause" in str(explanation)


def test_what_follows_from_the_target_and_what_compiles_nothing_is_noise(store: Store) -> None:
    add(store, key(target="avx2", options="a"))
    explanation = explain_miss(store, key(options="b"))
    assert [d.name for d in explanation.causes] == ["target"]
    assert "options: have 'a', want 'b' (noise: it follows from the target)" in str(explanation)
    add(store, key("manifest", sources="1"))
    manifest = explain_miss(store, key("manifest", sources="2"))
    assert manifest.causes == ()
    assert "nothing of it is a cause" in str(manifest)


def test_a_hit_is_no_miss(store: Store) -> None:
    path = add(store, key())
    explanation = explain_miss(store, key())
    assert explanation.hit == path
    assert explanation.differences == ()
    assert str(path) in str(explanation)


def test_a_damaged_artifact_is_the_reason(store: Store) -> None:
    (add(store, key()) / "a").unlink()
    add(store, key(torch="2.12.0"))
    explanation = explain_miss(store, key())
    (aside,) = explanation.quarantined
    assert f"damaged, set aside in {aside}" in str(explanation)
    assert explanation.nearest is not None


def test_every_factor_of_a_real_key_comes_with_advice() -> None:
    target = detect_target()
    for wanted in (stage_key("abc", target), kernels_key(target), runner_key()):
        for name, _ in wanted.factors:
            assert "(" in str(Difference(name, "one", "another")), (wanted.kind, name)
