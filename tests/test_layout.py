"""The shape of the code base: the rules of the house that no linter has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "trnc").rglob("*.py"))
SHIPPED = [
    path
    for folder in ("trnc", "docs", "tools", "graphs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in {".py", ".cpp", ".h", ".toml", ".md", ".txt", ".json"}
] + [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]

# Folders of one person or machine. `~` and what variables name are fine.
OF_A_MACHINE = re.compile(r"(?<![\w.~}])/(?:home|root|Users|work|tmp|mnt|media|scratch)/\w")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def test_the_vocabulary_is_short_and_imports_nothing_of_ours():
    core = ROOT / "trnc" / "core.py"
    assert len(core.read_text().splitlines()) <= 150
    assert not [name for name in imports_of(core) if name.startswith((".", "trnc"))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_why_it_is_there(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_no_file_names_a_path_of_a_machine():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in SHIPPED
        if (match := OF_A_MACHINE.search(path.read_text()))
    ]
    assert not found


def test_the_presets_at_the_top_are_those_that_ship():
    assert (ROOT / "presets").resolve() == ROOT / "trnc" / "presets"


def test_the_files_of_tests_that_start_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []
