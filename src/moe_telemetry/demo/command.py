"""`moe-telemetry demo`: a real streamed MoE under telemetry, until Ctrl-C or a number of tokens."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .settings import FAULTS, DemoError, DemoSettings

if TYPE_CHECKING:
    from moe_telemetry.telemetry import Telemetry

    from .engine import Engine
    from .generation import RunResult

DEFAULTS = DemoSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--tokens", type=int, metavar="N", help="decode so many tokens and end; without it, run until Ctrl-C")
    add("--host", metavar="H", help="where to serve metrics (127.0.0.1)")
    add("--port", type=int, metavar="P", help="port to serve metrics on (9464; 0 takes a free one)")
    add("--seed", type=int, default=DEFAULTS.seed, metavar="S", help="of the model's random weights (%(default)s)")
    add("--text", type=Path, metavar="FILE", help="text to follow, read as bytes; without it, texts of the package")
    add("--slots", type=int, default=DEFAULTS.slots, metavar="N", help="experts resident per layer (%(default)s)")
    add(
        "--read-mbps",
        type=float,
        default=DEFAULTS.read_mbps,
        metavar="R",
        help="speed of the simulated disk in MB/s (%(default)g); the page cache would make every prefetch early",
    )
    add("--no-prefetch", action="store_true", help="read experts on demand only")
    add("--lru", action="store_true", help="evict the least recently used expert, not the least used one")
    add(
        "--device-routing",
        action="store_true",
        help="hand routed ids to the recorder as MLX arrays, which it counts some passes later",
    )
    add("--snapshot", type=Path, metavar="FILE", help="write the exact totals as JSON at the end")
    add("--trace", type=Path, metavar="FILE", help="write the routing of all layers, for report --trace")
    add("--no-telemetry", action="store_true", help="the same run without recording, to measure what recording costs")
    add("--fault", choices=FAULTS, help="spoil the run for a while, to see it on a dashboard")
    add("--fault-after", type=float, default=DEFAULTS.fault_after, metavar="S", help="seconds (%(default)g)")
    add("--fault-for", type=float, default=DEFAULTS.fault_for, metavar="S", help="seconds (%(default)g)")
    add("--cache", type=Path, metavar="DIR", help="where the expert weights are kept (the user's cache folder)")
    add("--linger", type=float, default=0.0, metavar="S", help="at the end, serve until one more scrape, at most S s")


def run(options: argparse.Namespace) -> int:
    """Run the demo. DemoError and ConfigurationError carry the line to show with exit status 2."""
    settings = DemoSettings(
        tokens=options.tokens,
        seed=options.seed,
        text=options.text,
        slots=options.slots,
        read_mbps=options.read_mbps,
        prefetch=not options.no_prefetch,
        lru=options.lru,
        device_routing=options.device_routing,
        fault=options.fault,
        fault_after=options.fault_after,
        fault_for=options.fault_for,
        cache_dir=options.cache,
    )
    if settings.fault is None and (options.fault_after, options.fault_for) != (
        DEFAULTS.fault_after,
        DEFAULTS.fault_for,
    ):
        raise DemoError("--fault-after and --fault-for need --fault")
    if not options.linger >= 0:
        raise DemoError(f"--linger must be 0 seconds or more, not {options.linger:g}")
    for name in ("snapshot", "trace"):
        if options.no_telemetry and getattr(options, name):
            raise DemoError(f"--{name} needs telemetry: leave out --no-telemetry")
    try:
        from rich.console import Console

        from .engine import Engine
    except ModuleNotFoundError as error:
        raise DemoError(f"the demo needs {error.name}, the extra `demo`: pip install 'moe-telemetry[demo]'") from error

    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with ExitStack() as stack:
        snapshot_file = stack.enter_context(_writable(options.snapshot)) if options.snapshot else None
        telemetry = None if options.no_telemetry else stack.enter_context(_telemetry(options))
        engine = stack.enter_context(Engine(settings, on_build=say))
        say(f"Model: {engine.description}")
        engine.prepare()
        if telemetry is None or telemetry.url is None:
            say("Telemetry: off")
        else:
            say(f"Metrics: {telemetry.url}/metrics  (also {telemetry.url}/snapshot, {telemetry.url}/)")
        if settings.fault is not None:
            say(f"Fault: {settings.fault} after {settings.fault_after:g} s, for {settings.fault_for:g} s")
        if settings.tokens is None:
            say("Ctrl-C ends the run.")
        began = time.monotonic()
        result = _follow(engine, telemetry, console)
        _summary(result, telemetry, console, time.monotonic() - began)
        if telemetry is not None:
            if snapshot_file is not None:
                json.dump(telemetry.snapshot(), snapshot_file, indent=1)
                snapshot_file.flush()  # whole before the endpoint lingers
            telemetry.stop(linger=options.linger)
    return 0


def _telemetry(options: argparse.Namespace) -> Telemetry:
    from moe_telemetry import start

    return start(
        model="demo-moe",
        runtime="moe-telemetry-demo",
        host=options.host,
        port=options.port,
        pool_curve="all",  # of 12 layers a fourth would say little of the others
        trace=options.trace,
    )


def _follow(engine: Engine, telemetry: Telemetry | None, console: Any) -> RunResult:
    """The run itself, shown as it goes; SIGINT and SIGTERM end it at the next step."""
    stop = threading.Event()
    with _ended_by_signals(stop):
        if telemetry is None or telemetry.url is None:
            return engine.run(stop)
        from .view import View

        fault = f"The fault {engine.settings.fault} is on."
        notice = lambda: fault if engine.fault_active else ""  # noqa: E731
        with View(console, telemetry.snapshot, f"{telemetry.url}/metrics", notice) as view:
            return engine.run(stop, lambda step: view.tick())


@contextmanager
def _ended_by_signals(stop: threading.Event) -> Iterator[None]:
    def end(*_: object) -> None:
        if stop.is_set():  # asked twice: do not wait for the step
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(result: RunResult, telemetry: Telemetry | None, console: Any, seconds: float) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if telemetry is not None and telemetry.url is not None:
        from .view import footer, table

        snapshot = telemetry.snapshot()
        console.print(table(snapshot, None, f"Whole run, {seconds:.1f} s"), footer(snapshot), sep="", highlight=False)
    say(
        f"{result.decoded} tokens decoded and {result.prefilled} prompt tokens read in {seconds:.1f} s; "
        f"output {result.digest[:16]}"
    )


@contextmanager
def _writable(path: Path) -> Iterator[Any]:
    """The file, opened before the run: an hour of it must not end in a path that cannot be written."""
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot write the snapshot to {path}: {error.strerror}") from error
    with file:
        yield file
