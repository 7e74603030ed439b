"""`moe-telemetry report`: the end-of-run figures of a snapshot, from a file or from a running endpoint."""

from __future__ import annotations

import argparse
import json
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .reports import DAMAGE, ReportError, lines, report

FETCH_SECONDS = 10.0
MAX_BYTES = 64 << 20
"""Of a snapshot; a large one is less than 1 MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("source", metavar="SNAPSHOT.json|URL", help="a snapshot's file, or the address of an endpoint")
    parser.add_argument("--json", action="store_true", help="for machines, with the figures of every layer")


def run(options: argparse.Namespace) -> int:
    """Print the report. ReportError carries the line to show with exit status 2."""
    found = report(load(options.source))
    try:
        text = json.dumps(found, indent=1) if options.json else "\n".join(lines(found))
    except DAMAGE as error:
        raise ReportError(f"the snapshot is damaged: {type(error).__name__}") from error
    print(text)
    return 0


def load(source: str) -> Any:
    """The JSON of a file, or of an endpoint's `/snapshot`, which may be left out of the address."""
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(_snapshot_url(source), timeout=FETCH_SECONDS) as reply:
                text = reply.read(MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                text = file.read(MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ReportError(f"cannot read {source}: {_line(reason)}") from error
    if len(text) > MAX_BYTES:
        raise ReportError(f"{source} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{source} is not JSON") from error


def _line(reason: object) -> str:
    return " ".join(str(reason).split())


def _snapshot_url(given: str) -> str:
    parts = urlsplit(given)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith("/snapshot") else f"{path}/snapshot", fragment=""))
