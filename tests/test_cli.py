"""The command line as a whole: examples, errors of one line, shell completion."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile

import pytest

from moe_telemetry import cli, completion, snapshot
from moe_telemetry.testing import capture

NAMES = [name for name, *_ in cli.COMMANDS]


def status_of(*arguments: str) -> int:
    """Exit status of a command, however it ends."""
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("name", NAMES)
def test_each_commands_help_ends_with_examples_that_parse(name, capsys) -> None:
    """An example in the help is a command line that the parser takes."""
    assert 0 == status_of(name, "--help")
    shown = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert shown
    for example in shown:
        program, *words = shlex.split(example)
        assert "moe-telemetry" == program
        assert name == words[0]
        options = cli.build().parse_args(words)
        assert callable(options.run)


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("top", "--nothing"), ("report", "--json"), ("a\nb",)])
def test_what_cannot_be_parsed_is_one_line(arguments, capsys) -> None:
    """What is wrong and where to look, with exit status 2."""
    assert 2 == status_of(*arguments)
    printed = capsys.readouterr()
    assert ("", 1) == (printed.out, printed.err.count("\n"))
    assert printed.err.startswith("moe-telemetry")
    assert printed.err.rstrip().endswith("--help")


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    """Where the pipe is closed before anything is written, nothing is printed on standard error."""
    line = f'"{sys.executable}" -m moe_telemetry report "$0" | true; echo ${{PIPESTATUS[0]}}'
    with capture() as captured, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(snapshot.build(captured.store, []), file)
        file.flush()
        done = subprocess.run(["bash", "-c", line, file.name], capture_output=True, text=True, check=False)
    assert ("141\n", "") == (done.stdout, done.stderr)


def script(shell: str) -> str:
    pytest.importorskip("shtab")
    return completion.script(cli.build(), shell)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_commands_and_options(shell) -> None:
    """Every command, and options of some."""
    text = script(shell)
    for word in (*NAMES, "once", "markdown", "interval"):
        assert word in text


def test_completion_is_printed(capsys) -> None:
    """`--print-completion` needs no command."""
    assert 0 == status_of("--print-completion", "bash")
    assert capsys.readouterr().out.rstrip() == script("bash").rstrip()


def test_bash_completes(tmp_path) -> None:
    """A bash that sources the script completes commands, options of a command, and files."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "script").write_text(script("bash"))
    asked = """
source ./script
complete_of() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  $(complete -p moe-telemetry | sed 's/.*-F \\([^ ]*\\).*/\\1/') moe-telemetry "${COMP_WORDS[COMP_CWORD]}"
  echo "${COMPREPLY[@]}"
}
complete_of moe-telemetry re
complete_of moe-telemetry top --on
complete_of moe-telemetry report run
"""
    done = subprocess.run([bash, "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
    assert ["report", "--once", "run.json"] == [line.strip() for line in done.stdout.splitlines()]


def test_without_the_library_completion_says_what_to_install(monkeypatch, capsys) -> None:
    """One line that names the extra."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert 2 == status_of("--print-completion", "zsh")
    assert "[completion]" in capsys.readouterr().err


def test_the_command_starts_without_what_only_some_commands_need() -> None:
    """`report` and `top --once` on a small host: neither Textual nor MLX nor the SDK is loaded for them."""
    code = (
        "import sys, moe_telemetry.top.once; from moe_telemetry import cli; cli.build(); "
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'textual', 'mlx', 'rich', 'numpy', 'shtab', 'opentelemetry'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "[]\n" == done.stdout
