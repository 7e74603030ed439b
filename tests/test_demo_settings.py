"""Settings of the demo: what is refused, and where the cache goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.settings import DemoError, DemoSettings, default_cache_dir


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"slots": 15}, "slots must be at least 16"),
        ({"slots": 65}, "slots must be at most 64"),
        ({"read_mbps": 0.0}, "read_mbps must be a number above 0"),
        ({"read_mbps": float("nan")}, "read_mbps must be a number above 0"),
        ({"read_mbps": float("inf")}, "read_mbps must be a number above 0"),
        ({"fault": "gremlins"}, "unknown fault 'gremlins': choose from slow-disk, bad-predictor, small-pool"),
        ({"fault": "bad-predictor", "prefetch": False}, "needs prefetch"),
        ({"fault_after": -1.0}, "fault_after must be 0 seconds or more"),
        ({"fault_for": float("nan")}, "fault_for must be 0 seconds or more"),
        ({"text": Path("/no/such/file")}, "no text file at /no/such/file"),
        ({"text": Path("/")}, "no text file at /"),
    ],
)
def test_bad_values_are_one_clear_line(settings: dict[str, Any], message: str) -> None:
    """Each value that cannot work raises a DemoError that names it."""
    with pytest.raises(DemoError) as error:
        DemoSettings(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    """There must be a byte to follow."""
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DemoError, match="is empty"):
        DemoSettings(text=empty)


def test_sixteen_slots_hold_any_union() -> None:
    """The lowest number of slots is the largest union: a chunk of 4 tokens with 4 experts each."""
    assert ModelConfig().largest_union == DemoSettings(slots=16).slots


def test_the_default_model_stays_below_400_mb() -> None:
    """The demo's promise about disk space."""
    assert ModelConfig().total_bytes < 400e6


def test_cache_goes_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME wins if absolute; else the platform's folder in the home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "moe-telemetry" / "demo" == default_cache_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setattr(sys, "platform", "linux")
        assert tmp_path / ".cache" / "moe-telemetry" / "demo" == default_cache_dir()
        monkeypatch.setattr(sys, "platform", "darwin")
        assert tmp_path / "Library" / "Caches" / "moe-telemetry" / "demo" == default_cache_dir()


def test_key_follows_configuration_and_seed() -> None:
    """Other weights never share a cache folder."""
    keys = {ModelConfig().key(0), ModelConfig().key(1), ModelConfig(width=64).key(0), ModelConfig(top_k=2).key(0)}
    assert len(keys) == 4
    assert ModelConfig().key(0) == ModelConfig().key(0)
