"""The command `moe-telemetry`: exit status 0, or one line on standard error and 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from .completion import SHELLS, PrintCompletion
from .demo.settings import DemoError
from .programs import ProgramError
from .reports import ReportError
from .settings import ConfigurationError
from .terminal import printable
from .version import __version__


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


COMMANDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "demo",
        "demo.command",
        "run a small real MoE with streamed experts under telemetry",
        ("demo --fault bad-predictor", "demo --tokens 300 --snapshot run.json"),
    ),
    (
        "run",
        "run_command",
        "run a Python program under telemetry, mlx_lm's models watched",
        ("run -- mlx_lm.server --model PATH", "run --snapshot run.json -- python serve.py"),
    ),
    (
        "top",
        "top.command",
        "watch endpoints from a terminal",
        ("top", "top gpu-1:9464 https://gpu-2.example", "top --once --interval 10"),
    ),
    (
        "report",
        "report_command",
        "print the figures of a run from its snapshot, or compare two runs",
        ("report run.json", "report 127.0.0.1:9464", "report --markdown pool-16.json pool-6.json"),
    ),
    (
        "check",
        "monitoring.check",
        "say what a live endpoint lacks, and which panels and alerts are empty for it",
        ("check 127.0.0.1:9464",),
    ),
    (
        "stack",
        "monitoring.stack",
        "run Prometheus, Alertmanager and Grafana with the dashboards, without Docker",
        ("stack",),
    ),
    (
        "export",
        "monitoring.export",
        "write dashboards, rules and configuration for a site",
        ("export site --job moe --threshold recall_low=0.4",),
    ),
)
"""Name, module, what it does, and examples."""


def build(only: str | None = None) -> argparse.ArgumentParser:
    """The command line; of one command, where its name is given, with nothing loaded that others need.

    `run` runs its program also where a package is broken.
    """
    parser = _Parser(
        prog="moe-telemetry", description="Live telemetry for Mixture-of-Experts models with streamed experts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print a script for the shell to source"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, path, words, examples in COMMANDS:
        if only not in (None, name):
            continue
        module: Any = import_module(f".{path}", __package__)
        command = commands.add_parser(
            name,
            help=words,
            description=module.__doc__,
            epilog="\n".join(("examples:", *(f"  moe-telemetry {example}" for example in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` without the program's name, the process' own by default."""
    given = sys.argv[1:] if argv is None else list(argv)
    only = next((name for name, *_ in COMMANDS if given[:1] == [name]), None)
    try:
        options = build(only).parse_args(given)
        status: int | Callable[[], int] = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's end fails as well
        return 141
    except (ConfigurationError, DemoError, ProgramError, ReportError) as error:
        print(f"moe-telemetry: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    # A program that the command was asked to run: what that raises is its own.
    return status() if callable(status) else status
