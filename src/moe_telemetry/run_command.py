"""`moe-telemetry run`: any Python program under telemetry, with mlx_lm's models watched, in its own process.

PROGRAM is a console script (`mlx_lm.server`), `python script.py`, `python -m module`, `python -c code`, or a script's
path. It has its own arguments, exit status and signals, and runs also where telemetry cannot start.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from . import summary
from .imported import when_imported
from .launching import launch, restart
from .programs import Program, ProgramError, resolve
from .settings import LAYER_MODES

if TYPE_CHECKING:
    from .telemetry import Telemetry

WATCHED = "mlx_lm"
"""The runtime that is instrumented as soon as the program imports it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.usage = "%(prog)s [options] -- PROGRAM [arguments]"
    add = parser.add_argument
    add("--host", metavar="H", help="where to serve metrics (127.0.0.1)")
    add("--port", type=int, metavar="P", help="port to serve metrics on (9464; 0 takes a free one)")
    add("--model", metavar="NAME", help="the model's name (the last part of the program's own --model)")
    add("--runtime", metavar="NAME", help=f"the runtime's name ({WATCHED} where it is installed)")
    add("--run", dest="run_name", metavar="NAME", help="a name for this run")
    add("--layers", choices=LAYER_MODES, help="off drops the label `layer`")
    add("--decode-seq-max", type=int, metavar="N", help="most tokens of a pass that is decode without being named (8)")
    add("--otlp", action="store_true", help="push over OTLP, too")
    for name, words in (("cert", "serve over TLS"), ("key", "its key"), ("client-ca", "demand clients' certificates")):
        add(f"--tls-{name}", metavar="PEM", help=words)
    add("--snapshot", metavar="FILE", help="write the exact totals as JSON at the end")
    add("--trace", metavar="FILE", help="write the routing of one layer of four, for report --trace")
    add("--linger", type=float, default=0.0, metavar="S", help="at the end, serve until one more scrape, at most S s")
    add("--quiet", action="store_true", help="no address at the start, no summary at the end")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> Callable[[], int]:
    """Start telemetry; the function returned runs the program, and what that raises is the program's.

    Raises:
        ProgramError: it cannot be run here, or an option of the command makes no sense. Nothing has started then.
    """
    if not 0 <= options.linger < math.inf:
        raise ProgramError(f"--linger must be 0 seconds or more, not {options.linger:g}")
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    program = resolve(words)
    if program.interpreter:
        restart(program, words)
    try:
        with _signals_for_main_thread():
            telemetry = _start(options, program)
    except Exception as error:
        _say(f"the program runs without telemetry: {_line(error)}")
    else:
        _watch(telemetry, options)
    return partial(_run, program)


def _run(program: Program) -> int:
    launch(program)
    return 0


# -- start ------------------------------------------------------------------------------------------------------


def _start(options: argparse.Namespace, program: Program) -> Telemetry:
    from .telemetry import start

    named = os.environ.get("MOE_TELEMETRY_MODEL", "").strip()
    timed = os.environ.get("MOE_TELEMETRY_RUNTIME", "").strip()
    return start(
        model=options.model or (None if named else program.model),
        runtime=options.runtime or (None if timed or find_spec(WATCHED) is None else WATCHED),
        run=options.run_name,
        host=options.host,
        port=options.port,
        layers=options.layers,
        otlp=options.otlp,
        decode_seq_max=options.decode_seq_max,
        snapshot_file=options.snapshot,
        trace=options.trace,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
    )


@contextmanager
def _signals_for_main_thread() -> Iterator[None]:
    """Threads started here never receive a signal: a program that blocks one to wait for it would miss it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(telemetry: Telemetry, options: argparse.Namespace) -> None:
    # At exit, behind the program's last thread and its own exit handlers, which are registered later.
    atexit.register(_end, telemetry, options, os.getpid(), time.monotonic())
    if telemetry.url is None:
        if not options.quiet:
            _say("telemetry is off: OTEL_SDK_DISABLED is set")
        return
    telemetry._make_way = partial(_make_way, telemetry)
    when_imported(WATCHED, _instrument)
    if not options.quiet:
        _say(f"metrics at {telemetry.url}/metrics")


def _make_way(telemetry: Telemetry) -> None:
    """The program starts telemetry itself, which would fail for the port that ours has taken."""
    telemetry.stop()
    _say("stopped: the program has telemetry of its own")


def _instrument() -> None:
    try:
        from .integrations import mlx_lm

        mlx_lm.instrument()
    except Exception as error:
        _say(f"{WATCHED} runs without being recorded: {_line(error)}")
        logging.getLogger("moe_telemetry").debug("instrumenting failed", exc_info=True)


# -- end --------------------------------------------------------------------------------------------------------


def _end(telemetry: Telemetry, options: argparse.Namespace, process: int, began: float) -> None:
    """Tell what was recorded, and stop; but not in a forked child, nor where ours has made way."""
    if os.getpid() != process or telemetry._stop_once.locked():
        return
    seconds = time.monotonic() - began
    try:
        telemetry._finish()  # and not only behind the lingering
        snapshot = telemetry.snapshot()
        if telemetry.url is not None and not options.quiet:
            told = summary.lines(snapshot) or ["nothing was recorded"]
            _say("\n".join([f"whole run of {snapshot['run']['model']}, {seconds:.1f} s", *told]))
        telemetry.stop(linger=options.linger)
    except KeyboardInterrupt:  # somebody does not want to wait
        telemetry.stop()
    except Exception as error:
        _say(f"telemetry did not end well: {_line(error)}")


def _say(text: str) -> None:
    """On the process' own standard error, whatever the program has made of sys.stderr."""
    with suppress(Exception):
        if sys.__stderr__ is not None:
            print(f"moe-telemetry: {text}", file=sys.__stderr__, flush=True)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
