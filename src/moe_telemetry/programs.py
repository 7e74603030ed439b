"""What the words behind `moe-telemetry run --` name: a Python program that can run in this process."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

INTERPRETER = re.compile(r"python(?P<version>\d(\.\d+)?)?$")
FLAGS = "bBOPqRuWX"
"""Options of the interpreter that it is started anew with; the others would lose this package, or run no program."""
SOURCES = (".py", ".pyw", ".pyc", ".pyz")
WRAPPER = "import sys\nfrom {module} import {first}\nsys.exit({attribute}())\n"
"""What an installer writes for a console script."""


class ProgramError(Exception):
    """What cannot be run here, as one line for the person who asked."""


@dataclass(frozen=True)
class Program:
    """A program: one of `path` (a script, a folder or an archive), `module` and `code`, or what stdin holds.

    `argv` is its sys.argv; `code_name` what its code is said to be from. `interpreter` are options that need the
    interpreter started anew, and `words` the program's without them.
    """

    argv: tuple[str, ...]
    path: str | None = None
    module: str | None = None
    code: str | None = None
    code_name: str = "<string>"
    interpreter: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def model(self) -> str | None:
        """The last part of its own argument `--model`, the path or repository of a model."""
        return model_of(self.argv[1:])


def model_of(arguments: Sequence[str]) -> str | None:
    """The last path component of the value of `--model`, if a program's arguments have one."""
    for at, option in enumerate(arguments):
        name, equals, value = option.partition("=")
        if name == "--model":
            value = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
            return value.rstrip("/").rpartition("/")[2] or None
    return None


def resolve(words: Sequence[str]) -> Program:
    """The program that `words` name, as a shell would run them.

    Raises:
        ProgramError: nothing is named, or nothing that can run in this interpreter.
    """
    if not words:
        raise ProgramError("run needs a program: moe-telemetry run [options] -- PROGRAM [arguments]")
    name, *arguments = words
    if _is_interpreter(name):
        return _of_interpreter(arguments)
    if os.sep in name or name.endswith(SOURCES):
        return _script(name, words)
    return _console_script(name, arguments)


# -- python … ---------------------------------------------------------------------------------------------------


def _is_interpreter(word: str) -> bool:
    """Whether a word names this interpreter; ProgramError where it names another one."""
    if word == sys.executable:
        return True
    folder, name = os.path.split(word)
    named = INTERPRETER.match(name)
    if named is None or (folder and not os.path.isfile(word)):
        return False
    version = named["version"] or str(sys.version_info.major)
    here = ".".join(map(str, sys.version_info[:2]))
    if version not in (here, here.partition(".")[0]) or (folder and not _beside_ours(word)):
        raise ProgramError(f"{word} is another interpreter than the one here, {sys.executable}: {_INSTALL}")
    return True


_INSTALL = "install moe-telemetry there and run its own moe-telemetry"


def _beside_ours(interpreter: str) -> bool:
    """Whether an interpreter's path is in the folder of ours: the files are the same in every virtual environment."""
    try:
        return os.path.samefile(os.path.dirname(interpreter), os.path.dirname(sys.executable))
    except OSError:
        return False


def _of_interpreter(words: Sequence[str]) -> Program:
    options: list[str] = []
    left = list(words)
    while left:
        word, *rest = left
        if word == "-":
            return Program(("-", *rest), code_name="<stdin>", interpreter=tuple(options), words=("python", *left))
        if not word.startswith("-"):
            return Program(tuple(left), path=_existing(word), interpreter=tuple(options), words=("python", *left))
        left = rest
        for at, letter in enumerate(word[1:], 2):
            if letter not in "cmWX":
                if letter not in FLAGS:
                    can = " ".join(f"-{each}" for each in FLAGS)
                    raise ProgramError(f"the interpreter's option {word} cannot be had here; these can: {can}")
                options.append(f"-{letter}")
                continue
            if not (value := word[at:] or (left.pop(0) if left else "")):
                raise ProgramError(f"the interpreter's option -{letter} needs a value")
            if letter in "WX":
                options += [f"-{letter}", value]
                break
            given = ("python", f"-{letter}", value, *left)
            module, code = (value, None) if letter == "m" else (None, value)
            return Program((f"-{letter}", *left), None, module, code, interpreter=tuple(options), words=given)
    raise ProgramError("python alone is a session, not a program: name a script, -m MODULE, -c CODE or -")


# -- files ------------------------------------------------------------------------------------------------------


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise ProgramError(f"there is no file {path}")
    return path


def _script(path: str, words: Sequence[str]) -> Program:
    """A file that is to be run by its own right: Python by its suffix or its first line."""
    _existing(path)
    if not path.endswith(SOURCES) and not os.path.isdir(path):
        _refuse_foreign(path)
    return Program(tuple(words), path=path)


def _refuse_foreign(path: str) -> None:
    interpreter = _interpreter_of(path)
    if interpreter is None:
        raise ProgramError(f"{path} is no Python program: its first line names no Python interpreter")
    if os.sep in interpreter and not _beside_ours(interpreter):
        raise ProgramError(f"{path} belongs to another interpreter than the one here, {interpreter}: {_INSTALL}")


def _interpreter_of(path: str) -> str | None:
    """The Python interpreter that a script's first line names, a bare name behind `env`; None: it names none."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(1024).decode("utf-8", "replace")
    except OSError as error:
        raise ProgramError(f"cannot read {path}: {error.strerror}") from error
    line, _, rest = head.partition("\n")
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    if words[:1] == ["/bin/sh"] and (found := re.match(r"'''exec' \"?([^\"\n]+?)\"? \"\$0\"", rest)):
        return found[1]  # how installers write a path that is too long for a first line
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and INTERPRETER.match(os.path.basename(words[0])) else None


def _console_script(name: str, arguments: Sequence[str]) -> Program:
    """A command by its name: a console script of this environment first, then what PATH has."""
    if (entry := _entry_point(name)) is not None:
        for folder in dict.fromkeys((os.path.dirname(sys.executable), sysconfig.get_path("scripts"))):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and _beside_ours(_interpreter_of(path) or ""):
                return Program((path, *arguments), path=path)
        first = entry.attr.partition(".")[0]
        code = WRAPPER.format(module=entry.module, first=first, attribute=entry.attr)
        return Program((name, *arguments), code=code, code_name=name)
    if (found := shutil.which(name)) is None:
        raise ProgramError(f"there is no command {name}: neither a console script of this environment nor on PATH")
    _refuse_foreign(found)
    return Program((found, *arguments), path=found)


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def entry_of_module(module: str) -> EntryPoint | None:
    """The console script whose function is in `module`."""
    return next((entry for entry in entry_points(group="console_scripts") if entry.module == module), None)
