"""`moe-telemetry report`: the figures of a run from a snapshot's file or a running endpoint, or two runs compared.

With `--trace` also, or only, what pools of other eviction policies would have hit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import client, comparison, markdown, policy_report, trace_reader
from .comparison import Comparison
from .reports import DAMAGE, Report, ReportError, lines, report
from .terminal import printable

FETCH_SECONDS = 10.0
MAX_BYTES = 64 << 20
"""Of a snapshot; a large one is less than 1 MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SNAPSHOT.json|URL",
        help="a snapshot's file, or an endpoint's URL or host:port; of two, what the second makes of the first",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="a routing trace: hit rates of LRU, LFU and the optimum; of the snapshot's run, or alone, of the last run",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for machines, with the figures of every layer")
    form.add_argument("--markdown", action="store_true", help="for pasting into an issue")


def run(options: argparse.Namespace) -> int:
    """Print the report. ReportError carries the line to show with exit status 2."""
    sources = options.sources
    if len(sources) > 2:
        raise ReportError(f"report takes one snapshot, or two to compare, not {len(sources)}")
    if not sources and options.trace is None:
        raise ReportError("report needs a snapshot's file, an endpoint, or --trace; see moe-telemetry report --help")
    if len(sources) == 2 and options.trace is not None:
        raise ReportError("a trace is of one run: give one snapshot with --trace, or none")
    snapshots = [load(source) for source in sources]
    reports = [_of(source, report, snapshot) for source, snapshot in zip(sources, snapshots, strict=True)]
    try:
        if len(reports) == 2:
            text = _compared(comparison.compare(*snapshots), reports, sources, options)
        elif options.trace is None:
            text = _single(reports[0], options)
        else:
            text = _traced(reports, snapshots, options)
    except DAMAGE as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"the {_read_from(options)} is damaged: {type(error).__name__}") from error
    print(printable(text, keep="\n"))
    return 0


def _read_from(options: argparse.Namespace) -> str:
    return " or the ".join([*["snapshot"] * bool(options.sources), *["trace"] * (options.trace is not None)])


def _of(source: str, build: Any, snapshot: Any) -> Report:
    try:
        found: Report = build(snapshot)
    except ReportError as error:
        raise ReportError(f"{source}: {error}") from error
    return found


def _single(found: Report, options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps(found, indent=1)
    return "\n".join(markdown.report_lines(found) if options.markdown else lines(found))


def _traced(reports: list[Report], snapshots: list[Any], options: argparse.Namespace) -> str:
    run = snapshots[0]["run"]["run"] if snapshots else None
    found = policy_report.policy_report(trace_reader.read(options.trace, run), *snapshots)
    if options.json:
        return json.dumps({**(reports[0] if reports else {}), "policies": found}, indent=1)
    if options.markdown:
        head, told = (markdown.report_lines(reports[0]) if reports else []), markdown.policy_lines(found)
    else:
        head, told = (lines(reports[0]) if reports else [policy_report.heading(found)]), policy_report.lines(found)
    return "\n".join([*head, *[""] * bool(head), *told])


def _compared(found: Comparison, reports: list[Report], sources: list[str], options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps({"reports": reports, **_plain(found)}, indent=1)
    titles = [_title(source, each) for source, each in zip(sources, reports, strict=True)]
    return "\n".join((markdown.comparison_lines if options.markdown else comparison.lines)(found, *titles))


def _plain(found: Comparison) -> dict[str, Any]:
    """A comparison as plain data; figures are in the unit that stands with them."""
    return {
        "setup": {name: [first, second] for name, first, second in found.setup},
        "differences": {
            part or "neither": [
                {
                    "figure": each.figure.name,
                    "unit": each.figure.unit or ("share" if each.figure.share else ""),
                    "first": each.first,
                    "second": each.second,
                    "weight": each.weight,
                    "better": each.better,
                }
                for each in differences
            ]
            for part, differences in found.parts.items()
        },
        "notes": found.notes,
    }


def _title(source: str, found: Report) -> str:
    run, tokens = found["run"], found["phases"]["decode"]["figures"]["tokens"]
    return (
        f"{source}: {run['model']} on {run['runtime']}, run {run['run']}, {found['wall_seconds']:.1f} s, "
        f"{tokens:,} tokens decoded"
    )


def load(source: str) -> Any:
    """The JSON of a file, or of an endpoint's `/snapshot`, which may be left out of the address."""
    text = _fetched(source) if _is_address(source) else _read(source)
    if len(text) > MAX_BYTES:
        raise ReportError(f"{source} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{source} is not JSON") from error


def _is_address(source: str) -> bool:
    """A URL, or host:port where there is no such file."""
    if source.startswith(("http://", "https://")):
        return True
    host, colon, port = source.rpartition(":")
    return bool(host and colon and port.isdecimal()) and not Path(source).exists()


def _fetched(source: str) -> bytes:
    try:
        return client.get(f"{client.base_url(source)}/snapshot", "application/json", FETCH_SECONDS, MAX_BYTES)
    except client.ClientError as error:
        raise ReportError(f"cannot read {source}: {error}; is a run with telemetry at work there?") from error


def _read(source: str) -> bytes:
    try:
        with Path(source).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReportError(f"cannot read {source}: {' '.join(str(reason).split())}") from error
