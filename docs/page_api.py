"""docs/api.md: the public API, from its signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import moe_telemetry as mt
from moe_telemetry import profiling, testing
from moe_telemetry.hooks import HOOKS
from moe_telemetry.integrations import mlx_lm
from moe_telemetry.integrations.instrumentor import MoeInstrumentor

INTRODUCTION = """\
# API

Generated from signatures and docstrings by `make generate`; change them there. What is not named here may change in
any version. [instrumenting.md](instrumenting.md) has the hooks in their order, [metrics.md](metrics.md) their metrics.
"""


def _parameter(parameter: inspect.Parameter) -> str:
    text = str(parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not inspect.Parameter.empty:
        default = "recorder" if isinstance(parameter.default, mt.Recorder) else repr(parameter.default)
        text += f" = {default}"
    return text


def _signature(name: str, function: Callable[..., Any]) -> str:
    """One line where it fits, or a parameter a line; the annotations as the source has them."""
    signature = inspect.signature(function)
    words, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        words.append(_parameter(parameter))
    result = "" if signature.return_annotation in ("None", inspect.Signature.empty) else signature.return_annotation
    arrow = f" -> {result}" if result else ""
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){arrow}"])


def _told(thing: Any) -> str:
    """The docstring as Markdown: Args, Returns and Raises become lists."""
    lines = []
    inside = False
    for line in (inspect.getdoc(thing) or "").replace("``", "`").splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises):", line)
        inside = bool(heading) or (inside and (not line or line.startswith(" ")))
        if heading:
            lines += [f"{heading[1]}:", ""]
        elif inside and re.match(r"    \S", line):
            lines.append(f"- {re.sub(r'^([a-zA-Z_, ]+): ', _code, line.strip())}")
        elif inside and line:
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
            if line == "Keys:":  # what is indented below stays as it is written
                lines.append("")
    return "\n".join(lines)


def _code(match: re.Match[str]) -> str:
    return ", ".join(f"`{name.strip()}`" for name in match[1].split(",")) + ": "


def _entry(name: str, function: Callable[..., Any]) -> str:
    return f"### `{name}`\n\n```text\n{_signature(name, function)}\n```\n\n{_told(function)}"


def _methods(owner: str, kind: type, *names: str) -> list[str]:
    return [_entry(f"{owner}.{name}", getattr(kind, name)) for name in names]


def page() -> str:
    """The page's text."""
    names = ", ".join(f"`{name}`" for name in profiling.__all__)
    return (
        "\n\n".join(
            [
                INTRODUCTION.rstrip(),
                "## moe_telemetry",
                _told(mt),
                _entry("start", mt.start),
                f"### `Telemetry`\n\n{_told(mt.Telemetry)}",
                *_methods("Telemetry", mt.Telemetry, "snapshot", "stop"),
                _entry("report", mt.report),
                f"### `ConfigurationError`\n\nA ValueError. {_told(mt.ConfigurationError)}",
                f"### `Phase`\n\n`Phase.PREFILL`, `Phase.DECODE`; as strings `prefill`, `decode`. {_told(mt.Phase)}",
                f"## moe_telemetry.recorder\n\n{_told(mt.Recorder)}",
                *_methods("recorder", mt.Recorder, *HOOKS, "timed"),
                f"## moe_telemetry.testing\n\n{_told(testing)}",
                _entry("capture", testing.capture),
                f"### `Capture`\n\n{_told(testing.Capture)}",
                *_methods("Capture", testing.Capture, "series", "value", "total"),
                f"## moe_telemetry.integrations.mlx_lm\n\n{_told(mlx_lm)}",
                *(_entry(name, getattr(mlx_lm, name)) for name in mlx_lm.__all__),
                f"## moe_telemetry.integrations.instrumentor\n\n{_told(inspect.getmodule(MoeInstrumentor))}",
                f"### `MoeInstrumentor`\n\n{_told(MoeInstrumentor)}",
                "`instrument(**kwargs)` takes what `start` takes, `uninstrument()` puts everything back.",
                f"## moe_telemetry.profiling\n\n{_told(profiling)}",
                f"Names: {names}. [profiling.md](profiling.md) says what each is.",
            ]
        )
        + "\n"
    )
