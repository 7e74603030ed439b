"""Run a program in this process as `python` would: its own `__main__`, arguments, path, exit status and traceback."""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import runpy
import sys
import textwrap
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from .programs import Program, ProgramError, entry_of_module

PATCHED = "mlx_lm"
"""The package whose modules are patched: run as `__main__`, one of them would be a second copy without the patches."""

_replaced: list[ModuleType] = []
"""Main modules that had to go: the interpreter still deletes names in the first one's dict at its end, unowned."""


def launch(program: Program) -> None:
    """Run the program to its end. What it raises passes through, SystemExit too, and shows no frame of this package."""
    main = _main_module()
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv = list(program.argv)
    try:
        if program.module is not None:
            _run_module(program.module, main)
        elif program.path is not None and pkgutil.get_importer(program.path) is not None:
            _first_on_path(os.path.join(os.getcwd(), program.path))
            _run_as_main("__main__", alter_argv=False)
        elif program.path is not None:
            _run_file(program.path, main)
        else:
            _run_code(program, main)
    except SystemExit:
        raise
    except BaseException:
        _hide_frames()
        raise


def restart(program: Program, words: Sequence[str]) -> NoReturn:
    """Start this command anew, in this process, in an interpreter that has the options that the program asks for.

    Args:
        words: the program as given, which ends the process' arguments.
    """
    given = len(words)
    if sys.argv[-given:] != list(words):
        raise ProgramError(f"options of the interpreter ({' '.join(program.interpreter)}) need the command line")
    before = sys.orig_argv[1:-given]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.orig_argv[0], *program.interpreter, *before, *program.words])


# -- the main module --------------------------------------------------------------------------------------------


def _main_module() -> ModuleType:
    """`__main__` as the interpreter makes it, before it knows what it will run."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter)
    if "__annotations__" in vars(sys.modules["__main__"]):  # before Python 3.14
        main.__dict__.update(__annotations__={})
    return main


def _name_file(main: ModuleType, path: str) -> None:
    main.__dict__["__file__"] = path
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None


def _first_on_path(entry: str) -> None:
    """Put the program's folder where ours is; there is none with -P."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = entry


def _run_file(path: str, main: ModuleType) -> None:
    full = os.path.join(os.getcwd(), path)
    loader: Any = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", full)
    main.__dict__["__loader__"] = loader
    _name_file(main, full)
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    if path.endswith(".pyc"):
        code: CodeType = loader.get_code("__main__")
    else:
        code = compile(loader.get_data(full), full, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_code(program: Program, main: ModuleType) -> None:
    _first_on_path("")
    source: str | bytes | None = program.code
    if source is None:
        _name_file(main, program.code_name)
        source = sys.stdin.buffer.read()
    elif sys.version_info >= (3, 14):
        source = textwrap.dedent(program.code or "")
    exec(compile(source, program.code_name, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, main: ModuleType) -> None:
    _first_on_path(os.getcwd())
    entry = entry_of_module(name) if name.partition(".")[0] == PATCHED else None
    if entry is None:
        _run_as_main(name, alter_argv=True)
        return
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {name}", name=name)
    main.__dict__.update(
        __spec__=spec, __loader__=spec.loader, __package__=spec.parent, __file__=spec.origin, __cached__=spec.cached
    )
    sys.argv[0] = spec.origin
    importlib.import_module(name)
    entry.load()()


def _run_as_main(name: str, alter_argv: bool) -> None:
    """What the interpreter itself calls for -m, folders and archives."""
    run: Any = vars(runpy)["_run_module_as_main"]
    run(name, alter_argv)


# -- its traceback ----------------------------------------------------------------------------------------------


def _hide_frames() -> None:
    """Let the hook that will show the exception begin at the program's frames."""
    show = sys.excepthook

    def show_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _frames_of_program(trace)
        sys.last_traceback = trace
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_program


def _frames_of_program(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code is not launch.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename == launch.__code__.co_filename:
        trace = trace.tb_next
    return trace
