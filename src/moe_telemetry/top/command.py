"""`moe-telemetry top`: watch endpoints from a terminal, or print one frame of their figures."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from functools import partial

from moe_telemetry.client import DEFAULT_URL, ClientError, base_url
from moe_telemetry.settings import ConfigurationError

INTERVAL_SECONDS = 5.0
"""As our Prometheus scrapes: an answer takes the watched process 10 to 40 ms of processor time."""
LEAST_INTERVAL, MOST_INTERVAL = 0.2, 60.0
MOST_ENDPOINTS = 32
POLITE = 10
"""Niceness: on a busy host what is watched goes first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "urls", nargs="*", metavar="URL", help=f"endpoints, as URL or host:port ({DEFAULT_URL.partition('//')[2]})"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_SECONDS,
        metavar="S",
        help=f"seconds between scrapes, {LEAST_INTERVAL:g} to {MOST_INTERVAL:g} (%(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="print the figures of one interval as text, and end")


def run(options: argparse.Namespace) -> int:
    """Watch until q, or once. ConfigurationError carries the line to show with exit status 2."""
    if not (math.isfinite(options.interval) and LEAST_INTERVAL <= options.interval <= MOST_INTERVAL):
        raise ConfigurationError(
            f"--interval must be from {LEAST_INTERVAL:g} to {MOST_INTERVAL:g} seconds, not {options.interval:g}"
        )
    try:
        bases = list(dict.fromkeys(base_url(given) for given in options.urls or [DEFAULT_URL]))
    except ClientError as error:
        raise ConfigurationError(str(error)) from None
    if len(bases) > MOST_ENDPOINTS:
        raise ConfigurationError(f"top watches at most {MOST_ENDPOINTS} endpoints, not {len(bases)}")
    return _once(bases, options.interval) if options.once else _screen(bases, options.interval)


def _once(bases: list[str], interval: float) -> int:
    from .once import text, watch_once

    watched = watch_once(bases, interval)
    blocks = ["\n".join(text(each, time.monotonic())) for each in watched if each.frame is not None]
    if blocks:
        print("\n\n".join(blocks))
    failed = [f"{each.url}: {each.failure}" for each in watched if each.failure is not None]
    if failed:
        raise ConfigurationError(f"cannot scrape {'; '.join(failed)}: is a run with telemetry at work there?")
    return 0


def _screen(bases: list[str], interval: float) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("top needs a terminal: use --once where there is none")
    try:
        from .app import TopApp
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"top needs {error.name}, the extra `tui`: pip install 'moe-telemetry[tui]'; --once needs nothing"
        ) from error
    from .poller import Poller
    from .pools import ask
    from .watched import Watched

    if hasattr(os, "nice"):
        os.nice(POLITE)
    app = TopApp([Watched(base) for base in bases], partial(Poller, bases, interval), ask=ask)
    app.run()
    return app.return_code or 0
