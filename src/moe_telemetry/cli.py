"""The command `moe-telemetry`: exit status 0, or one line on standard error and 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import report_command, run_command
from .demo import command as demo
from .demo.settings import DemoError
from .monitoring import check, export, stack
from .programs import ProgramError
from .reports import ReportError
from .settings import ConfigurationError
from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` without the program's name, the process' own by default."""
    parser = argparse.ArgumentParser(
        prog="moe-telemetry", description="Live telemetry for Mixture-of-Experts models with streamed experts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module, words in (
        ("demo", demo, "run a small real MoE with streamed experts under telemetry"),
        ("run", run_command, "run a Python program under telemetry, mlx_lm's models watched"),
        ("report", report_command, "print the figures of a run from its snapshot"),
        ("check", check, "say what a live endpoint lacks, and which panels and alerts are empty for it"),
        ("stack", stack, "run Prometheus, Alertmanager and Grafana with the dashboards, without Docker"),
        ("export", export, "write dashboards, rules and configuration for a site"),
    ):
        command = commands.add_parser(name, help=words, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(argv)
    try:
        status: int | Callable[[], int] = options.run(options)
    except (ConfigurationError, DemoError, ProgramError, ReportError) as error:
        print(f"moe-telemetry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    # A program that the command was asked to run: what that raises is its own.
    return status() if callable(status) else status
