"""Live telemetry for Mixture-of-Experts models whose experts are streamed from disk.

Importing this is cheap and safe anywhere: it loads neither mlx nor OpenTelemetry, and the hooks do nothing until
`start()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hooks import Phase, Recorder, recorder
from .processes import warn_if_spawned as _warn_if_spawned
from .settings import ConfigurationError
from .version import __version__

if TYPE_CHECKING:
    from .reports import report
    from .telemetry import Telemetry, start

__all__ = ["ConfigurationError", "Phase", "Recorder", "Telemetry", "__version__", "recorder", "report", "start"]

_warn_if_spawned()


def __getattr__(name: str) -> Any:
    """`start` and `Telemetry`, with the OpenTelemetry SDK behind them, and `report`, when they are first asked for."""
    if name == "report":
        from .reports import report

        return report
    if name not in ("start", "Telemetry"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import telemetry
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        raise ConfigurationError(
            f"moe_telemetry.{name} needs {missing}, which is not installed: pip install moe-telemetry"
        ) from error
    return getattr(telemetry, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
