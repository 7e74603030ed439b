"""The scripts of examples/ run as they stand, and record what they say they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def printed(name: str, *words: str) -> str:
    """What an example prints that ends well and complains of nothing."""
    line = [sys.executable, FOLDER / name, "--port", "0", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_every_example_is_run_here():
    """A script without a test of its own would rot."""
    assert {"streaming_runtime.py", "mlx_lm_generate.py"} == {path.name for path in FOLDER.glob("*.py")}


def test_a_streaming_runtime():
    """Every figure that the report has is there: lookups, recall, windows, stall, requests."""
    text = printed("streaming_runtime.py", "--tokens", "60")
    for words in (
        "metrics at http://127.0.0.1:",
        "hit rate of lookups",
        "recall of the predictor",
        "stall, ms a token",
    ):
        assert words in text
    assert "2 requests of" in text
    assert "tokens                                32            60" in text


def test_mlx_lm():
    """Routing and a request of generation, with a model that needs no download."""
    pytest.importorskip("mlx_lm")
    text = printed("mlx_lm_generate.py", "--tokens", "12")
    assert "tokens                                18            12" in text
    assert "1 request of" in text
    assert "1        24    4.00" in " ".join(text.split("decode\n")[-1].split("union")[1:])
