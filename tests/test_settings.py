"""Arguments and environment merged and validated: every variable, who wins, and what a mistake says."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import free_port

import moe_telemetry as mt
from moe_telemetry.settings import MAX_LAYERS, MAX_TEXT, ConfigurationError, Settings, resolve


def settings(environ: dict[str, str] | None = None, **arguments: Any) -> Settings:
    return resolve(environ={} if environ is None else environ, **arguments)


def message(environ: dict[str, str] | None = None, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        settings(environ, **arguments)
    text = str(raised.value)
    assert "\n" not in text
    assert 200 > len(text)
    return text


def test_defaults() -> None:
    """Without arguments and variables everything has the documented default."""
    expected = Settings(
        model="unknown",
        runtime="unknown",
        run="",
        layer_ids=(),
        host="127.0.0.1",
        port=9464,
        explicit_endpoint=False,
        layers=True,
        otlp=False,
        otlp_by_environment=False,
        decode_seq_max=8,
        snapshot_file=None,
        pool_curve="sample",
        trace=None,
        trace_bytes=64 << 20,
        disabled=False,
    )
    assert expected == settings()


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected", "argument", "wins"),
    [
        ("MOE_TELEMETRY_MODEL", " qwen ", "model", "qwen", {"model": "a"}, "a"),
        ("MOE_TELEMETRY_RUNTIME", "rt", "runtime", "rt", {"runtime": "a"}, "a"),
        (
            "MOE_TELEMETRY_SNAPSHOT_FILE",
            "/a.json",
            "snapshot_file",
            Path("/a.json"),
            {"snapshot_file": "/b"},
            Path("/b"),
        ),
        ("MOE_TELEMETRY_RUN", "night", "run", "night", {"run": "a"}, "a"),
        ("MOE_TELEMETRY_LAYERS", "off", "layers", False, {"layers": "all"}, True),
        ("MOE_TELEMETRY_POOL_CURVE", "off", "pool_curve", "off", {"pool_curve": "all"}, "all"),
        ("MOE_TELEMETRY_TRACE", "/a.trace", "trace", Path("/a.trace"), {"trace": "/b"}, Path("/b")),
        ("MOE_TELEMETRY_TRACE_BYTES", "100000", "trace_bytes", 100_000, {"trace_bytes": 1 << 20}, 1 << 20),
        ("MOE_TELEMETRY_DECODE_SEQ_MAX", "16", "decode_seq_max", 16, {"decode_seq_max": 4}, 4),
        ("OTEL_EXPORTER_PROMETHEUS_HOST", "0.0.0.0", "host", "0.0.0.0", {"host": "::1"}, "::1"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "9470", "port", 9470, {"port": 0}, 0),
    ],
)
def test_environment_is_taken_and_an_argument_wins(
    variable: str, value: str, field: str, expected: object, argument: dict[str, Any], wins: object
) -> None:
    """Each variable sets its field, an argument beats it, and an empty variable is none."""
    assert expected == getattr(settings({variable: value}), field)
    assert wins == getattr(settings({variable: value}, **argument), field)
    for empty in ("", "  "):
        assert getattr(settings(), field) == getattr(settings({variable: empty}), field)


@pytest.mark.parametrize("value", ["true", "True", "TRUE", " true "])
def test_only_true_disables(value: str) -> None:
    """OTEL_SDK_DISABLED disables when it is "true" in any case."""
    found = settings({"OTEL_SDK_DISABLED": value})
    assert (True, ()) == (found.disabled, found.warnings)


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("yes", True), ("on", True), ("", False), ("false", False)])
def test_other_values_do_not_disable(value: str, warns: bool) -> None:
    """Anything else leaves telemetry on, and is warned of where somebody may have meant it."""
    found = settings({"OTEL_SDK_DISABLED": value})
    assert (False, warns) == (found.disabled, bool(found.warnings))
    if warns:
        assert (f"OTEL_SDK_DISABLED is {value!r}: only 'true' disables telemetry",) == found.warnings


@pytest.mark.parametrize(
    ("value", "expected"),
    [("otlp", True), ("prometheus, otlp", True), ("none", False), ("", False), ("otlp2", False), ("console", False)],
)
def test_otlp_by_environment(value: str, expected: bool) -> None:
    """OTEL_METRICS_EXPORTER asks for OTLP when it lists it."""
    assert expected == settings({"OTEL_METRICS_EXPORTER": value}).otlp_by_environment


@pytest.mark.parametrize("value", ["abc", "99999", "-1", "1.5", "1e3", "9_464", "٩٤٦٤", "0x10", "9" * 5_000])
def test_a_bad_port_names_the_variable(value: str) -> None:
    """A port that is none is one sentence with the variable, the range and the value."""
    text = message({"OTEL_EXPORTER_PROMETHEUS_PORT": value})
    assert text.startswith("OTEL_EXPORTER_PROMETHEUS_PORT must be a whole number from 0 to 65535, not ")
    assert value[:20] in text


@pytest.mark.parametrize("value", [-1, 65_536, "9464", 9464.0, True, float("nan"), 10**400, [9464]])
def test_a_bad_port_names_the_argument(value: object) -> None:
    """The same for the argument."""
    assert message(port=value).startswith("port must be a whole number from 0 to 65535, not ")


@pytest.mark.parametrize("value", ["0", "-3", "eight", "8.0"])
def test_a_bad_decode_seq_max_names_the_variable(value: str) -> None:
    """So is a decode_seq_max below 1 or that is no number."""
    assert f"MOE_TELEMETRY_DECODE_SEQ_MAX must be a whole number from 1 to {2**53}, not" in message(
        {"MOE_TELEMETRY_DECODE_SEQ_MAX": value}
    )
    assert "decode_seq_max must be" in message(decode_seq_max=0)


@pytest.mark.parametrize("value", ["ALL", "none", "1", "x" * 500])
def test_bad_layers_name_the_variable(value: str) -> None:
    """So is a mode of layers that does not exist."""
    assert message({"MOE_TELEMETRY_LAYERS": value}).startswith("MOE_TELEMETRY_LAYERS must be 'all' or 'off', not")
    assert message(layers=value).startswith("layers must be 'all' or 'off', not")


@pytest.mark.parametrize("name", ["model", "runtime", "run", "host"])
@pytest.mark.parametrize("value", [5, b"x", ["x"], object()])
def test_text_must_be_a_string(name: str, value: object) -> None:
    """Text arguments of another type are refused by name."""
    assert f"{name} must be a string, not {type(value).__name__}" == message(**{name: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        (0, ()),
        (3, (0, 1, 2)),
        (np.int64(3), (0, 1, 2)),
        ([5, "7", np.int32(9), 5], (5, 7, 9)),
        (range(2, 8, 2), (2, 4, 6)),
        ({1: "a"}, (1,)),
    ],
)
def test_num_layers_is_a_number_or_ids(given: Any, expected: tuple[int, ...]) -> None:
    """num_layers counts from 0, or lists the MoE layers' ids in any form a hook takes."""
    assert expected == settings(num_layers=given).layer_ids


@pytest.mark.parametrize(
    "given", [-1, MAX_LAYERS + 1, 3.0, True, "48", object(), [1.5], ["a"], [None, object()], [10**9]]
)
def test_bad_num_layers(given: object) -> None:
    """Anything else is refused with a sentence about num_layers."""
    assert message(num_layers=given).startswith("num_layers ")


def test_endless_num_layers_is_refused() -> None:
    """An iterable without end is read as far as the limit, and refused."""
    from itertools import count

    assert f"num_layers must hold at most {MAX_LAYERS} ids" == message(num_layers=count())


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a\ud800b", "a?b"), ("a\0b", "a?b"), ("x" * 10_000, "x" * MAX_TEXT), ("é\n", "é\n"), ("a\udcff", "a?")],
)
def test_text_is_made_fit_for_a_label(given: str, expected: str) -> None:
    """Names are what UTF-8 can encode, without NUL, and bounded, from argument and environment alike."""
    assert expected == settings(model=given).model
    assert expected.strip() == settings({"MOE_TELEMETRY_MODEL": given}).model


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_PROMETHEUS_PORT", "MOE_TELEMETRY_DECODE_SEQ_MAX", "MOE_TELEMETRY_LAYERS"]
)
def test_a_bad_variable_fails_at_start(variable: str, monkeypatch: pytest.MonkeyPatch, recorder: mt.Recorder) -> None:
    """start() raises it before anything has changed: hooks stay off."""
    monkeypatch.setenv(variable, "abc")
    with pytest.raises(ConfigurationError, match=variable):
        mt.start(recorder=recorder)
    assert mt.Recorder is type(recorder)


def test_variables_reach_the_endpoint(monkeypatch: pytest.MonkeyPatch, recorder: mt.Recorder) -> None:
    """Host and port of OpenTelemetry's variables are where it listens."""
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    with mt.start(recorder=recorder) as telemetry:
        assert port == telemetry.port


def test_a_doubtful_value_is_logged_at_start(
    monkeypatch: pytest.MonkeyPatch, recorder: mt.Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """OTEL_SDK_DISABLED=1 starts telemetry and says so in one warning."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "1")
    with caplog.at_level(logging.WARNING), mt.start(port=0, recorder=recorder) as telemetry:
        assert telemetry.url
    assert ["OTEL_SDK_DISABLED is '1': only 'true' disables telemetry"] == [each.message for each in caplog.records]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recorder": object()}, "recorder must be a moe_telemetry.Recorder, not object"),
        ({"registry": {}}, "registry must be a prometheus_client registry, not dict"),
        ({"meter_provider": object()}, "meter_provider must be an opentelemetry.sdk.metrics.MeterProvider"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused(options: dict[str, Any], text: str) -> None:
    """Recorder, registry and provider are checked before anything starts."""
    with pytest.raises(ConfigurationError) as raised:
        mt.start(port=0, **options)
    assert text == str(raised.value)
    assert mt.Recorder is type(mt.recorder)


def test_snapshot_file_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From argument and variable alike, wherever the process changes its folder to; empty is none."""
    monkeypatch.chdir(tmp_path)
    for found in (
        settings(snapshot_file="totals.json"),
        settings(snapshot_file=Path("totals.json")),
        settings({"MOE_TELEMETRY_SNAPSHOT_FILE": " totals.json "}),
        settings({"MOE_TELEMETRY_SNAPSHOT_FILE": "other.json"}, snapshot_file=tmp_path / "totals.json"),
    ):
        assert tmp_path / "totals.json" == found.snapshot_file
    for none in ({}, {"MOE_TELEMETRY_SNAPSHOT_FILE": ""}, {"MOE_TELEMETRY_SNAPSHOT_FILE": " "}):
        assert settings(none).snapshot_file is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("/no/such/folder/totals.json", "there is no such folder"),
        ("/", "it is a folder"),
        ("/proc/nothing/here", "there is no such folder"),
        ("a\0b", "that is no path"),
        (3.5, "that is no path"),
        (["a"], "that is no path"),
        ("x" * 10_000, "that is no path"),
    ],
)
def test_a_bad_snapshot_file_is_one_line(value: Any, why: str) -> None:
    """What cannot be written at the end is told at the start, by argument or variable."""
    assert message(snapshot_file=value).startswith("snapshot_file cannot be ")
    assert message(snapshot_file=value).endswith(f": {why}")
    if isinstance(value, str):
        assert message({"MOE_TELEMETRY_SNAPSHOT_FILE": value}).startswith("MOE_TELEMETRY_SNAPSHOT_FILE cannot be ")


def test_a_trace_needs_a_folder_a_size_and_the_pool_curve() -> None:
    """What cannot be written, a bound that holds nothing, and layers that are not followed."""
    assert message(trace="/no/such/folder/t").endswith(": there is no such folder")
    assert message(trace_bytes=10).startswith("trace_bytes must be a whole number from 65536 to ")
    assert message({"MOE_TELEMETRY_TRACE_BYTES": "many"}).startswith("MOE_TELEMETRY_TRACE_BYTES must be a whole number")
    off = "trace needs the layers that pool_curve follows: 'sample' or 'all', not 'off'"
    assert off == message({"MOE_TELEMETRY_POOL_CURVE": "off"}, trace="/t") == message(trace="/t", pool_curve="off")
    assert settings({"OTEL_SDK_DISABLED": "true"}, trace="/no/such/folder/t").trace is None


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    """So is one that only others may write to."""
    tmp_path.chmod(0o500)
    assert message(snapshot_file=tmp_path / "x").endswith(": its folder cannot be written to")
