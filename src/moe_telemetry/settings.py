"""What `start()` was told and what the environment adds, validated once into one object.

The environment is OpenTelemetry's where it has a variable, and MOE_TELEMETRY_* otherwise; an argument wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from . import values
from .reuse import MODES

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9464
LAYER_MODES = ("all", "off")
MAX_TEXT = 1024
TRACE_BYTES = (64 << 20, 64 << 10, 1 << 40)
"""Of a routing trace's file: by default, at least, at most."""
MAX_LAYERS = 10_000
"""Far more than are exported apart (store.LAYER_BUDGET): a number of bytes or parameters given by mistake fails."""


class ConfigurationError(ValueError):
    """Telemetry cannot start as configured; the message is one sentence for a person."""


@dataclass(frozen=True)
class Settings:
    """Validated settings of one telemetry. `explicit_endpoint`: host or port was an argument.

    `snapshot_file`: where stopping writes the totals, an absolute path in a folder that can be written to.
    `pool_curve`: one of `reuse.MODES`. `trace`: where routing is written to, a file of at most `trace_bytes`.
    """

    model: str
    runtime: str
    run: str
    layer_ids: tuple[int, ...]
    host: str
    port: int
    explicit_endpoint: bool
    layers: bool
    otlp: bool
    otlp_by_environment: bool
    decode_seq_max: int
    snapshot_file: Path | None
    pool_curve: str
    trace: Path | None
    trace_bytes: int
    disabled: bool
    warnings: tuple[str, ...] = ()


def resolve(
    *,
    model: str | None = None,
    runtime: str | None = None,
    run: str | None = None,
    num_layers: int | Iterable[int] | None = None,
    host: str | None = None,
    port: int | None = None,
    layers: str | None = None,
    otlp: bool = False,
    decode_seq_max: int | None = None,
    snapshot_file: str | os.PathLike[str] | None = None,
    pool_curve: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    trace_bytes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge arguments and environment; ConfigurationError names the argument or variable that is wrong."""
    env = os.environ if environ is None else environ
    disabled, warnings = _disabled(env.get("OTEL_SDK_DISABLED", ""))
    curve = _choice("pool_curve", pool_curve, env, "MOE_TELEMETRY_POOL_CURVE", MODES)
    trace_file = None if disabled else _file("trace", trace, env, "MOE_TELEMETRY_TRACE")
    if trace_file is not None and curve == "off":
        raise ConfigurationError("trace needs the layers that pool_curve follows: 'sample' or 'all', not 'off'")
    return Settings(
        model=_text("model", model, env, "MOE_TELEMETRY_MODEL", "unknown"),
        runtime=_text("runtime", runtime, env, "MOE_TELEMETRY_RUNTIME", "unknown"),
        run=_text("run", run, env, "MOE_TELEMETRY_RUN", ""),
        layer_ids=_layer_ids(num_layers),
        host=_text("host", host, env, "OTEL_EXPORTER_PROMETHEUS_HOST", DEFAULT_HOST) or DEFAULT_HOST,
        port=_number("port", port, env, "OTEL_EXPORTER_PROMETHEUS_PORT", DEFAULT_PORT, 0, 65_535),
        explicit_endpoint=host is not None or port is not None,
        layers=_choice("layers", layers, env, "MOE_TELEMETRY_LAYERS", LAYER_MODES) == "all",
        otlp=otlp,
        otlp_by_environment="otlp" in [name.strip() for name in env.get("OTEL_METRICS_EXPORTER", "").split(",")],
        decode_seq_max=_number(
            "decode_seq_max", decode_seq_max, env, "MOE_TELEMETRY_DECODE_SEQ_MAX", 8, 1, values.MAX_COUNT
        ),
        snapshot_file=None if disabled else _file("snapshot_file", snapshot_file, env, "MOE_TELEMETRY_SNAPSHOT_FILE"),
        pool_curve=curve,
        trace=trace_file,
        trace_bytes=_number("trace_bytes", trace_bytes, env, "MOE_TELEMETRY_TRACE_BYTES", *TRACE_BYTES),
        disabled=disabled,
        warnings=warnings,
    )


def _disabled(value: str) -> tuple[bool, tuple[str, ...]]:
    """OpenTelemetry's rule for booleans: only "true" in any case is true; anything else that is set is warned of."""
    text = value.strip().lower()
    if text in ("", "true", "false"):
        return text == "true", ()
    return False, (f"OTEL_SDK_DISABLED is {_shown(value)}: only 'true' disables telemetry",)


def printable(text: str) -> str:
    """Text that a label may hold: UTF-8 can encode it, and it is bounded, since it stands in every scrape."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "?")


def _text(name: str, given: object, env: Mapping[str, str], variable: str, default: str) -> str:
    if given is None:
        return printable(env.get(variable, "").strip()) or default
    if not isinstance(given, str):
        raise ConfigurationError(f"{name} must be a string, not {type(given).__name__}")
    return printable(given)


def _file(name: str, given: object, env: Mapping[str, str], variable: str) -> Path | None:
    """A file that can be written later on, or None; the folder is looked at now, when somebody reads the message."""
    where: str = variable if given is None else name
    value: Any = env.get(variable, "").strip() if given is None else given
    if isinstance(value, str) and not value:
        return None
    try:
        path = Path(os.fsdecode(value)).absolute()
        why = "that is no path" if "\0" in str(path) else _unwritable(path)
    except (TypeError, ValueError, OSError):  # of another type; a name that is too long
        why = "that is no path"
    if why:
        raise ConfigurationError(f"{where} cannot be {_shown(value)}: {why}")
    return path


def _unwritable(path: Path) -> str:
    """Why a file cannot be made there, or nothing."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return "there is no such folder"
    return "" if os.access(path.parent, os.W_OK | os.X_OK) else "its folder cannot be written to"


def _number(name: str, given: object, env: Mapping[str, str], variable: str, default: int, low: int, high: int) -> int:
    if given is not None:
        where, number = name, given
    else:
        text = env.get(variable, "").strip()
        if not text:
            return default
        where = variable
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise ConfigurationError(f"{where} must be a whole number from {low} to {high}, not {_shown(number)}")
    return number


def _choice(name: str, given: str | None, env: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    """One of the choices, the first by default."""
    where = name if given is not None else variable
    value = given if given is not None else env.get(variable, "").strip() or choices[0]
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigurationError(f"{where} must be {', '.join(others)} or {last}, not {_shown(value)}")
    return value


def _layer_ids(num_layers: int | Iterable[int] | None) -> tuple[int, ...]:
    """Ids of the MoE layers: 0 to n-1 of a number, or those given."""
    if num_layers is None:
        return ()
    given: Iterable[object]
    if isinstance(num_layers, Integral) and not isinstance(num_layers, bool):
        number = int(num_layers)
        if not 0 <= number <= MAX_LAYERS:
            raise ConfigurationError(f"num_layers must be from 0 to {MAX_LAYERS}, not {_shown(number)}")
        given = range(number)
    elif isinstance(num_layers, Iterable) and not isinstance(num_layers, str):
        given = list(islice(num_layers, MAX_LAYERS + 1))
        if len(given) > MAX_LAYERS:
            raise ConfigurationError(f"num_layers must hold at most {MAX_LAYERS} ids")
    else:
        raise ConfigurationError(f"num_layers must be a number or the layers' ids, not {_shown(num_layers)}")
    try:
        return tuple(dict.fromkeys(values.layer_index(layer) for layer in given))
    except values.Refused as error:
        raise ConfigurationError(f"num_layers holds something that is not a layer's id ({error.kind})") from None


def _shown(value: object) -> str:
    """A value in a message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
