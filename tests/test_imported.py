"""Acting on an import: once, behind it, and never in its way."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from moe_telemetry.imported import when_imported

NAME = "imported_by_a_test"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that nobody has imported; what is on the search path stays as it was."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / NAME / "part.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.meta_path.copy()
    yield tmp_path / NAME
    assert before == sys.meta_path
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_it_acts_once_behind_the_import_of_the_package_or_a_part() -> None:
    """The module is whole by then, has its own loader, and what else is imported is not touched."""
    seen: list[ModuleType] = []
    when_imported(NAME, lambda: seen.append(sys.modules[NAME]))
    assert importlib.util.find_spec(NAME) is not None  # a look is no import
    assert [] == seen
    part = importlib.import_module(f"{NAME}.part")
    assert (2, [1]) == (part.VALUE, [module.VALUE for module in seen])
    loader = type(part.__loader__)
    assert [loader, loader] == [type(seen[0].__loader__), type(seen[0].__spec__.loader)]
    importlib.reload(seen[0])
    assert 1 == len(seen)


def test_it_acts_at_once_where_the_module_is_there() -> None:
    """Instrumenting late is as good as early."""
    importlib.import_module(NAME)
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    assert [1] == seen


def test_two_may_wait_for_one_module_and_one_may_call_it_off() -> None:
    """Each acts by itself; what was called off does nothing, a second time either."""
    seen: list[int] = []
    calls_off = [when_imported(NAME, lambda number=number: seen.append(number)) for number in range(3)]
    calls_off[1]()
    calls_off[1]()
    importlib.import_module(NAME)
    assert [0, 2] == sorted(seen)


def test_an_error_is_logged_and_the_import_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong behind an import is not the importer's."""
    when_imported(NAME, lambda: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert 1 == importlib.import_module(NAME).VALUE
    assert [f"{NAME} is imported without what was to be done about it"] == [each.message for each in caplog.records]


def test_an_import_that_fails_fails_as_ever(package: Path) -> None:
    """It may be tried again, and is acted on when it succeeds."""
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    (package / "__init__.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert [] == seen
    (package / "__init__.py").write_text("VALUE = 33\n")
    importlib.invalidate_caches()
    assert 33 == importlib.import_module(NAME).VALUE
    assert [1] == seen


def test_a_module_that_does_not_exist_stays_missing() -> None:
    """The error is the interpreter's."""
    call_off = when_imported("no_module_of_this_name", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
        importlib.import_module("no_module_of_this_name")
    call_off()
