"""The architecture: imports go one way, importing is cheap, and the public names are complete."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

import moe_telemetry
from moe_telemetry.hooks import HOOKS, Recorder
from moe_telemetry.live import LiveRecorder, ThreadedRecorder
from moe_telemetry.recording import LockedRecorder

ROOT = Path(moe_telemetry.__file__).parent

LAYERS = (
    {"catalog", "version"},
    {"values", "routing_trace", "reuse", "loads", "cells", "hooks", "processes"},
    {"store", "settings"},
    {"losses", "series"},
    {"duration_hooks"},
    {"counting", "adding"},
    {"following"},
    {"passes"},
    {"tallies", "calls"},
    {"reduction"},
    {"pending"},
    {"routing"},
    {"live"},
    {"recording"},
    {"integrations.mlx_lm.patches", "integrations.mlx_lm.binding"},
    {"integrations.mlx_lm.threads"},
    {"integrations.mlx_lm.passes"},
    {"integrations.mlx_lm.generation", "integrations.mlx_lm.batches", "integrations.mlx_lm.serving"},
    {"integrations.mlx_lm.instrumentation"},
    {"host", "snapshot", "collection", "exposition"},
    {"pages", "tls", "rounds", "connections", "rendering"},
    {"readers", "otlp", "endpoint", "providers"},
    {"telemetry"},
    {"testing"},
)
"""From the hook to the scrape: a module imports from sets before its own, or from its own set."""
TOP = len(LAYERS)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FACADE = {"hooks", "processes", "settings", "version"}
"""What the package itself imports at once; all the rest comes when it is asked for."""


def module_of(path: Path) -> str:
    """A file's module below the package: "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports when it is imported itself."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _run_at_import(ast.parse(FILES[name].read_text()).body):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif node.level:
            above = ["moe_telemetry", *filter(None, package.split("."))]
            base = ".".join([*above[: len(above) + 1 - node.level], *filter(None, (node.module,))])
            full = [f"{base}.{alias.name}" for alias in node.names]
        else:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        for one in full:
            if one.split(".")[0] == "moe_telemetry":
                found.add(_existing(one.split(".")[1:]))
    return found - {name}


def _run_at_import(body: list[ast.stmt]):
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _run_at_import(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _run_at_import(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _run_at_import(handler.body)


def _existing(parts: list[str]) -> str:
    while parts and ".".join(parts) not in FILES:
        parts = parts[:-1]
    return ".".join(parts)


def rank(name: str) -> int:
    """A module's place; what is not listed is an application of the library, and on top."""
    return RANK.get(name, TOP)


@pytest.mark.parametrize("name", [name for name in FILES if name])
def test_imports_go_one_way(name):
    """A module imports only what comes before it on the way from hook to scrape."""
    allowed = {other for other in FILES if rank(other) <= rank(name)}
    assert set() == imports(name) - allowed - {""}
    if rank(name) < TOP:
        assert "" not in imports(name)


def test_there_are_no_cycles():
    """No module imports itself, by whatever way round."""
    graph = {name: imports(name) - {""} for name in FILES if name}
    assert sorted(graph) == sorted(TopologicalSorter(graph).static_order())


def test_the_listed_modules_exist():
    """A module that was renamed must be listed anew, or nothing would be checked of it."""
    assert set() == set(RANK) - set(FILES)


def test_the_reading_of_imports_reads_them():
    """The check sees what is known to be imported."""
    assert {"catalog"} == imports("cells")
    assert {"catalog", "values", "reuse", "loads", "cells", "hooks"} == imports("store")
    assert FACADE == imports("")
    assert set() == imports("hooks") == imports("catalog")


def test_only_the_host_and_routing_know_mlx():
    """The hot path never imports MLX; the demo and integrations may."""
    hot = ("catalog", "values", "cells", "hooks", "store", "losses", "live", "recording", "series")
    assert [] == [name for name in hot if _names_mlx(ast.parse(FILES[name].read_text()))]


def _names_mlx(node: ast.AST) -> bool:
    """Whether code that runs imports mlx; what only a type checker reads does not run."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return any(map(_names_mlx, node.orelse))
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("mlx") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").startswith("mlx")
    return any(map(_names_mlx, ast.iter_child_nodes(node)))


def run(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_importing_loads_neither_mlx_nor_opentelemetry():
    """Importing the package is cheap, and calling its hooks stays so."""
    code = (
        "import sys, moe_telemetry as mt; mt.recorder.forward(1); mt.recorder.routed(0, {1}); "
        "print(sorted(name for name in sys.modules "
        "if name.split('.')[0] in ('mlx', 'opentelemetry', 'prometheus_client', 'psutil', 'numpy')))"
    )
    assert "[]\n" == run(code)


def test_hooks_record_without_opentelemetry():
    """The cells need no SDK: a capture works where only the package itself is installed."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('mlx', 'opentelemetry', 'prometheus_client', 'psutil', 'numpy')))\n"
        "from moe_telemetry import recorder as rec\n"
        "from moe_telemetry.testing import capture\n"
        "with capture() as cap:\n"
        "    rec.tokens(3)\n"
        "    rec.routed(0, [1, 2], {1})\n"
        "print(cap.total('moe.tokens'))\n"
    )
    assert "3\n" == run(code)


def _is_ours(value: object) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return module.startswith("moe_telemetry") and not isinstance(value, ModuleType)


def test_all_is_complete():
    """Every public name of the package is in __all__, and every one there exists."""
    public = {name for name, value in vars(moe_telemetry).items() if not name.startswith("_") and _is_ours(value)}
    assert public <= set(moe_telemetry.__all__)
    assert sorted(moe_telemetry.__all__) == sorted(set(moe_telemetry.__all__))
    assert [] == [name for name in moe_telemetry.__all__ if getattr(moe_telemetry, name) is None]
    assert {"start", "recorder", "Phase", "__version__"} <= set(moe_telemetry.__all__)


def test_what_does_not_exist_is_an_attribute_error():
    """The lazy import of `start` does not make every name look importable."""
    with pytest.raises(AttributeError, match="stop"):
        moe_telemetry.stop  # noqa: B018


@pytest.mark.parametrize("variant", [LiveRecorder, LockedRecorder])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_live_body_of_the_same_signature(hook, variant):
    """What can be called off can be called on, by the same names and defaults."""

    def signature(owner):
        parameters = inspect.signature(getattr(owner, hook)).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert signature(Recorder) == signature(variant)
    assert hook in vars(variant)


@pytest.mark.parametrize("hook", [*HOOKS, "timed"])
def test_every_hook_says_what_it_is_for(hook):
    """The off hooks carry the documentation, and do nothing else."""
    body = ast.parse(dedent(inspect.getsource(getattr(Recorder, hook)))).body[0]
    assert inspect.getdoc(getattr(Recorder, hook)).rstrip().endswith((".", "`", ")."))
    assert (2 if hook == "timed" else 1) == len(body.body)


def test_the_threaded_hooks_are_the_live_ones():
    """Threads change where a pass is found, not what is recorded."""
    assert set() == set(HOOKS) & set(vars(ThreadedRecorder))
