"""`moe-telemetry stack`: Prometheus, Alertmanager and Grafana without Docker, from the same files, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from moe_telemetry.settings import DEFAULT_HOST, DEFAULT_PORT, ConfigurationError

from .export import add_config_arguments, config_of, write

READY_SECONDS = 120.0
"""Grafana prepares its database at the first start."""
LEAST_PROMETHEUS = (2, 42)
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Program:
    """A server of the stack: the names its binary goes by, its usual port, and how to get it."""

    name: str
    binaries: tuple[str, ...]
    port: int
    ready: str
    install: str

    def find(self) -> str | None:
        """Path of its binary."""
        return next(filter(None, map(shutil.which, self.binaries)), None)


PROMETHEUS = Program(
    "Prometheus", ("prometheus",), 9090, "/-/ready", "apt-get install prometheus, or brew install prometheus"
)
ALERTMANAGER = Program(
    "Alertmanager",
    ("alertmanager", "prometheus-alertmanager"),
    9093,
    "/-/ready",
    "apt-get install prometheus-alertmanager, or brew install alertmanager",
)
GRAFANA = Program(
    "Grafana",
    ("grafana", "grafana-server"),
    3000,
    "/api/health",
    "https://grafana.com/grafana/download, or brew install grafana",
)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Loopback is never asked of a proxy."""
PROGRAMS = (ALERTMANAGER, PROMETHEUS, GRAFANA)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add(
        "--targets",
        default=f"{DEFAULT_HOST}:{DEFAULT_PORT}",
        metavar="HOST:PORT,...",
        help="exporters to scrape (%(default)s)",
    )
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep data here (DIR/dashboards is written anew at each start); without it, in a folder that is removed",
    )
    for program in PROGRAMS:
        flag = f"--{program.name.lower()}-port"
        add(
            flag, type=int, metavar="P", help=f"port of {program.name} ({program.port}, or a free one when it is taken)"
        )
    add("--expect-always", action="store_true", help="alert when a target is gone; without it a run may end")
    add("--webhook", metavar="URL", help="where Alertmanager sends alerts")
    add_config_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run what is installed until SIGINT or SIGTERM."""
    found = {program: path for program in PROGRAMS if (path := program.find())}
    if PROMETHEUS not in found:
        raise ConfigurationError(f"prometheus is not on PATH: {PROMETHEUS.install}")
    _refuse_old(found[PROMETHEUS])
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        data = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-telemetry-")))
        ports = {p: _port(p, getattr(options, f"{p.name.lower()}_port")) for p in PROGRAMS}
        config = replace(
            config_of(options),
            targets=tuple(options.targets.split(",")),
            names=(),
            alertmanager=f"127.0.0.1:{ports[ALERTMANAGER]}",
        )
        if options.webhook:
            config = replace(config, webhook_url=options.webhook)
        files = data / "dashboards"
        write(config, files)
        if options.expect_always:
            entries = "".join(f'- {{targets: ["{each}"], labels: {{expect: always}}}}\n' for each in config.targets)
            (files / "prometheus" / "targets" / "hosts.yml").write_text(entries, encoding="utf-8")
        processes = []
        for program in PROGRAMS:
            if program not in found:
                print(f"{program.name}: not on PATH ({program.install})", flush=True)
                continue
            process = _start(program, found[program], files, data, ports)
            stack.callback(_end, process)
            processes.append((program, process))
            _wait(program, process, ports[program], data, stop)
            if not stop.is_set():
                print(f"{program.name}: http://127.0.0.1:{ports[program]}", flush=True)
        print(f"Scraping {', '.join(config.targets)}. Ctrl-C ends it.", flush=True)
        while not stop.wait(0.5):
            for program, process in processes:
                if process.poll() is not None:
                    raise ConfigurationError(f"{program.name} has ended: see {_log(program, data)}")
    return 0


def _refuse_old(binary: str) -> None:
    """Name the version that the rules need; an older Prometheus would only say that a field is unknown."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version (\d+)\.(\d+)", done.stdout + done.stderr)
    if version and (int(version[1]), int(version[2])) < LEAST_PROMETHEUS:
        least = ".".join(map(str, LEAST_PROMETHEUS))
        raise ConfigurationError(f"Prometheus {version[1]}.{version[2]} is too old: the rules need {least}")


def _port(program: Program, given: int | None) -> int:
    """The port asked for, the usual one, or a free one when that is taken."""
    for port in (given,) if given is not None else (program.port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OverflowError:
                raise ConfigurationError(f"--{program.name.lower()}-port {port} is no port") from None
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigurationError(f"port {given} for {program.name} is taken")


def _start(
    program: Program, binary: str, files: Path, data: Path, ports: dict[Program, int]
) -> subprocess.Popen[bytes]:
    builders: dict[Program, Callable[[], list[str]]] = {
        PROMETHEUS: lambda: [
            f"--config.file={files / 'prometheus' / 'prometheus.yml'}",
            f"--storage.tsdb.path={data / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{ports[PROMETHEUS]}",
            "--web.enable-lifecycle",
        ],
        ALERTMANAGER: lambda: [
            f"--config.file={files / 'alertmanager' / 'alertmanager.yml'}",
            f"--storage.path={data / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{ports[ALERTMANAGER]}",
            "--cluster.listen-address=",
        ],
        GRAFANA: lambda: [
            *(["server"] if Path(binary).name == "grafana" else []),
            f"--homepath={_grafana_home(binary)}",
        ],
    }
    if program is GRAFANA:
        # Packages put a wrapper on PATH that reads a configuration of its own, which a user may not.
        own = _grafana_home(binary) / "bin" / "grafana"
        binary = str(own) if os.access(own, os.X_OK) else binary
    environment = {
        **os.environ,
        "MOE_PROMETHEUS_URL": f"http://127.0.0.1:{ports[PROMETHEUS]}",
        "MOE_DASHBOARDS": str((files / "grafana").resolve()),
        "GF_PATHS_PROVISIONING": str((files / "grafana" / "provisioning").resolve()),
        "GF_PATHS_DATA": str((data / "grafana").resolve()),
        "GF_PATHS_LOGS": str((data / "grafana" / "log").resolve()),
        "GF_PATHS_PLUGINS": str((data / "grafana" / "plugins").resolve()),
        "GF_LOG_MODE": "console",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str((files / "grafana" / "moe-overview.json").resolve()),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(ports[GRAFANA]),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
    }
    with _log(program, data).open("wb") as log:
        # A session of its own: Ctrl-C reaches us first, and we end it in order.
        return subprocess.Popen(
            [binary, *builders[program]()], env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _grafana_home(binary: str) -> Path:
    """Where Grafana keeps its public files: beside the binary, or where packages put them."""
    real = Path(binary).resolve()
    places = (real.parent.parent, real.parent.parent / "share" / "grafana", Path("/usr/share/grafana"))
    return next((place for place in places if (place / "public").is_dir()), places[0])


def _log(program: Program, data: Path) -> Path:
    return data / f"{program.name.lower()}.log"


def _wait(program: Program, process: subprocess.Popen[bytes], port: int, data: Path, stop: threading.Event) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not stop.wait(0.1):
        try:
            with _DIRECT.open(f"http://127.0.0.1:{port}{program.ready}", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                lines = _log(program, data).read_text(errors="replace").splitlines()
                last = next((line for line in reversed(lines) if line.strip()), "no word")
                raise ConfigurationError(f"{program.name} did not start: {last}") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
