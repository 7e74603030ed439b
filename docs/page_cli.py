"""docs/cli.md: each command with its arguments, from the parsers that the program itself uses."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from moe_telemetry.cli import COMMANDS

INTRODUCTION = """\
# Commands

Generated from the commands' parsers by `make generate`; change them there.

`moe-telemetry COMMAND`, or `python -m moe_telemetry COMMAND`. Exit status 0, or 2 and one line on standard error that
says what is wrong; `run` has the exit status of its program. `moe-telemetry --version` prints the version, and
`moe-telemetry --print-completion bash` (or `zsh`, `tcsh`) a script that completes commands and options (extra
`completion`).
"""


def _words(action: argparse.Action) -> str:
    """The argument as it is written on a command line."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    value = metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        many = {"?": f"[{value}]", "*": f"[{value} …]", "+": f"{value} …"}
        return many.get(str(action.nargs), value)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _positionals(parser: argparse.ArgumentParser) -> list[str]:
    return [_words(action) for action in parser._actions if not action.option_strings]


def _row(action: argparse.Action) -> str:
    words = _words(action).replace("|", "\\|")
    told = ((action.help or "") % vars(action)).replace("|", "\\|")
    return f"| `{words}` | {told} |"


def _section(name: str, path: str, examples: tuple[str, ...]) -> str:
    module: Any = import_module(f"moe_telemetry.{path}")
    parser = argparse.ArgumentParser(prog=f"moe-telemetry {name}", add_help=False)
    module.add_arguments(parser)
    usage = parser.usage or " ".join(["%(prog)s", "[options]", *_positionals(parser)])
    rows = [_row(action) for action in parser._actions if action.help != argparse.SUPPRESS]
    examples_ = [f"moe-telemetry {example}" for example in examples]
    lines = [f"## {name}", "", module.__doc__.strip(), "", f"`{usage % {'prog': parser.prog}}`", ""]
    if rows:
        lines += ["| argument | |", "|---|---|", *rows, ""]
    return "\n".join([*lines, "For example:", "", "```text", *examples_, "```"])


def page() -> str:
    """The page's text."""
    sections = [_section(name, path, examples) for name, path, _, examples in COMMANDS]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"
