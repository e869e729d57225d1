"""The documents name what the code has: preset keys, flags, variables, files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from trnc.cli.main import app
from trnc.ops.native import TARGETS
from trnc.presets import Preset, TrainiumOptions, parse_preset

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "docs" / "CONFIGURATION.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def flags_of(command: object) -> Iterator[str]:
    for sub in getattr(command, "commands", {}).values():
        yield from flags_of(sub)
    for parameter in getattr(command, "params", []):
        yield from (name for name in parameter.opts if name.startswith("-"))


def test_every_flag_is_documented():
    flags = set(flags_of(typer.main.get_command(app))) - {"--help"}
    assert {"--model", "--max-body-bytes", "--dry-run", "--older-than-days"} <= flags
    assert not [flag for flag in sorted(flags) if f"`{flag}`" not in CONFIGURATION]


def test_every_documented_flag_exists():
    flags = {"--help", *flags_of(typer.main.get_command(app))}
    for page in PAGES:
        commands = re.findall(r"`(?:trnc [^`]*?)?(--[a-z-]+)", page.read_text())
        assert not [flag for flag in commands if flag not in flags], page


def test_every_preset_key_is_documented_with_its_default():
    for field in fields(Preset):
        if field.name in ("name", "trainium"):
            continue
        row = re.search(rf"^\| `{field.name}` \|.*$", CONFIGURATION, re.MULTILINE)
        assert row is not None, field.name
        default = row.group().split(" | ")[2].strip("`")
        assert default in ("required", str(field.default).lower(), f'"{field.default}"')


def test_every_key_of_the_trainium_table_is_documented():
    table = (ROOT / "docs" / "TRAINIUM.md").read_text()
    assert not [f.name for f in fields(TrainiumOptions) if f"`trainium.{f.name}`" not in table]
    assert "| `trainium` |" in CONFIGURATION


def test_the_preset_example_is_valid():
    (example,) = re.findall(r"```toml\n(.*?)```", CONFIGURATION, re.DOTALL)
    assert parse_preset(example, name="example").max_rows == 1


def test_every_variable_that_is_read_is_documented():
    sources = "\n".join(path.read_text() for path in (ROOT / "trnc").rglob("*.py"))
    names = set(re.findall(r'environ(?:\.get)?[(\[]"([A-Z_]+)"', sources))
    assert {"TRNC_STORE", "TRNC_TARGET", "CXX"} <= names
    set_by_us = {"TORCHINDUCTOR_CACHE_DIR"}
    assert not [n for n in sorted(names - set_by_us) if n not in CONFIGURATION]


def test_the_targets_are_those_of_the_kernels():
    row = re.search(r"^\| `TRNC_TARGET` .*$", CONFIGURATION, re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`([a-z0-9]+)`", row.group())) == {t.name for t in TARGETS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_file_that_a_page_names_exists(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:trnc|tests|tools|docs|graphs)/[\w./-]+)`", text):
        if not name.startswith("graphs/"):
            assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:compiler|serve|engine|runtime|models|ops)/\w+\.py)`", text):
        assert (ROOT / "trnc" / name).exists(), name


def test_every_extra_and_script_is_in_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trnc": "trnc.cli.main:main"}
    extras = {"dev", "grammar", "prove", "instructor", "cuda", "trainium"}
    assert set(project["optional-dependencies"]) == extras
