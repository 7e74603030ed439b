"""The command `moe-telemetry`: exit status 0, or one line on standard error and 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .demo import command as demo
from .demo.settings import DemoError
from .settings import ConfigurationError
from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` without the program's name, the process' own by default."""
    parser = argparse.ArgumentParser(
        prog="moe-telemetry", description="Live telemetry for Mixture-of-Experts models with streamed experts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo_parser = commands.add_parser(
        "demo", help="run a small real MoE with streamed experts under telemetry", description=demo.__doc__
    )
    demo.add_arguments(demo_parser)
    demo_parser.set_defaults(run=demo.run)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except (ConfigurationError, DemoError) as error:
        print(f"moe-telemetry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
