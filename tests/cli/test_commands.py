"""Every command teaches, and says in one line what is wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.cli.command import fails, trnc
from trnc import __version__
from trnc.presets import load_preset, preset_names
from trnc.serve.listening import ServeOptions

COMMANDS = ["serve", "compile", "generate", "bench", "presets", "pull", "explain-miss", "version"]
CACHE_COMMANDS = ["path", "ls", "verify", "gc"]


def test_help_lists_every_command():
    ran = trnc("--help")
    assert ran.status == 0
    assert not [name for name in [*COMMANDS, "cache"] if f" {name} " not in ran.out]


@pytest.mark.parametrize(
    "command", [[name] for name in COMMANDS] + [["cache", name] for name in CACHE_COMMANDS]
)
def test_every_command_has_help(command):
    ran = trnc(*command, "--help")
    assert ran.status == 0
    assert f"Usage: trnc {' '.join(command)}" in ran.out


def test_version():
    assert trnc("version").out == f"trnc {__version__}\n"


def test_presets_are_listed_with_their_limits():
    out = trnc("presets").out
    for preset in map(load_preset, preset_names()):
        assert preset.name in out
        assert f"up to {preset.max_rows}" in out


@pytest.mark.parametrize("command", [["serve"], ["compile"], ["generate", "x"], ["explain-miss"]])
def test_an_unknown_preset_is_one_line_with_the_nearest(command):
    said = fails(*command, "--preset", "defualt")
    assert "--preset defualt: no such preset. Did you mean 'default'?" in said


@pytest.mark.parametrize("command", [["serve"], ["compile"], ["generate", "x"], ["explain-miss"]])
def test_a_block_that_would_not_be_used_is_refused(command):
    said = fails(*command, "--mtp", "block.safetensors")
    assert "--mtp: preset 'default' does not speculate" in said
    assert "--preset mtp-dynamic" in said


@pytest.mark.parametrize("command", [["serve"], ["generate", "x"], ["pull"]])
def test_an_unknown_model_is_one_line_with_the_nearest(command):
    flag = [] if command == ["pull"] else ["--model"]
    said = fails(*command, *flag, "smollm-135m")
    assert "--model smollm-135m: no such model. Did you mean 'smollm2-135m'?" in said


def test_what_a_person_wrote_is_printed_as_it_was_written():
    assert "--preset [bold]x.toml: no such file" in fails("serve", "--preset", "[bold]x.toml")
    assert "--model [red]/x.gguf: no such file" in fails("generate", "x", "--model", "[red]/x.gguf")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["serve", "--backend", "indctor"], ["--backend", "'inductor'"]),
        (["serve", "--loop", "plan"], ["--loop", "'plain'"]),
        (["serve", "--port", "70000"], ["--port", "65535"]),
        (["serve", "--prot", "1"], ["--prot", "--port"]),
        (["serve", "--grace-seconds", "-1"], ["--grace-seconds"]),
        (["compile", "--jobs", "0"], ["--jobs"]),
        (["generate"], ["prompt"]),
        (["serv"], ["'serve'"]),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_right(arguments, names):
    ran = trnc(*arguments)
    assert ran.status == 2
    assert "Traceback" not in ran.err
    assert not [name for name in names if name not in ran.err], ran.err


def test_a_light_command_loads_no_torch_and_no_server():
    check = (
        "import sys, trnc.cli.main; heavy = {'torch', 'uvicorn', 'zmq', 'tokenizers', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_api_process_of_serve_never_imports_torch():
    check = "import sys, trnc.cli.serve_command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_warm_start_of_the_engine_loads_no_compiler():
    check = (
        "import sys, trnc.cli.engine_command, trnc.runtime.start;"
        "assert 'torch._inductor.codecache' not in sys.modules;"
        "assert 'trnc.compiler.compile' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_defaults_of_serve_are_those_of_the_server():
    from trnc.cli.main import serve

    parameters = inspect.signature(serve).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    options = ServeOptions()
    shared = {"api_key": "api_keys", "allowed_origin": "allowed_origins"}
    for name in {field.name for field in fields(ServeOptions)} & set(defaults):
        assert defaults[name] == getattr(options, name)
    for flag, name in shared.items():
        assert (defaults[flag] or ()) == getattr(options, name)
