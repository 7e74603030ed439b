"""Child processes: what tells one that its parent's telemetry is not its own."""

from __future__ import annotations

import logging
import os
import sys

PARENT_VARIABLE = "MOE_TELEMETRY_PARENT"
"""Set to the process id while its telemetry runs; a child that multiprocessing spawns inherits it."""


def mark(running: bool) -> None:
    """Tell children, started from now on, whether telemetry runs here."""
    if running:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
    else:
        os.environ.pop(PARENT_VARIABLE, None)


def warn_if_spawned() -> None:
    """One line in a child that multiprocessing started while its parent's telemetry ran: never a silent loss.

    A program started any other way inherits the variable too, but is nobody's worker and stays silent.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return
    process = multiprocessing.current_process()
    # Set while a worker imports its parent's main module, when it has no parent_process() yet.
    importing = getattr(process, "_inheriting", False)
    if importing and process.name == "MainProcess":
        os.register_at_fork(after_in_child=_warn)  # a fork server imports for its children, who then do not
    elif importing or multiprocessing.parent_process() is not None:
        _warn()


def _warn() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent not in (None, str(os.getpid())):
        logging.getLogger("moe_telemetry").warning(
            "hooks are off in this process (%d), a child of one that records (%s); call start() in it to record here "
            "too",
            os.getpid(),
            parent,
        )
