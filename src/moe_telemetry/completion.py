"""Shell completion: a static script, so that a press of TAB starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from .settings import ConfigurationError

SHELLS = ("bash", "zsh", "fish", "tcsh")
FILES = ("FILE", "DIR", "PEM")
"""Metavars that stand for paths; what holds `.json` is a file, too."""


class PrintCompletion(argparse.Action):
    """`--print-completion SHELL`: print the script for that shell, and end."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """ConfigurationError where the library is not installed."""
        print(script(parser, str(values)))
        parser.exit()


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion of a parser for a shell."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--print-completion needs {error.name}, the extra `completion`: pip install 'moe-telemetry[completion]'"
        ) from error
    _hint(parser, {"DIR": shtab.DIRECTORY}, shtab.FILE)
    text: str = shtab.complete(parser, shell)
    return text


def _hint(parser: argparse.ArgumentParser, special: dict[str, Any], file: Any) -> None:
    """Paths are completed as paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _hint(command, special, file)
        elif isinstance(action.metavar, str) and (action.metavar in FILES or ".json" in action.metavar):
            action.complete = special.get(action.metavar, file)  # type: ignore[attr-defined]
