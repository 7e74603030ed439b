"""The stack: compose file, and the commands stack, export and check."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("grafana_foundation_sdk")
import yaml
from prometheus import binary

import moe_telemetry as mt
from moe_telemetry import Recorder, catalog, cli
from moe_telemetry.monitoring import check, export, reasons, stack
from moe_telemetry.monitoring.config import Config, duration, seconds

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]


def command(*arguments, path=None, timeout=60):
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    line = [sys.executable, "-m", "moe_telemetry", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


# -- compose ------------------------------------------------------------------------------------------------------


def test_compose_file_is_valid():
    """The file fits the published compose schema."""
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stdout.replace("ok -- validation done\n", ""))


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name):
    """Each image has a version of three numbers; the demo is built here."""
    assert "build" in SERVICES[name] or re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_mounts_exist_and_are_read_only(name):
    """Each folder of the repository is there and mounted read-only; all data is on named volumes."""
    for mount in SERVICES[name].get("volumes", []):
        source, _, mode = mount.split(":") if mount.count(":") == 2 else (*mount.split(":"), "")
        if source.startswith("."):
            assert "ro" == mode
            assert (ROOT / source).is_dir()
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "ports" in service])
def test_ports_are_on_loopback_and_services_say_when_they_are_healthy(name):
    """Nothing is published to other hosts, and what others wait for has a health check."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    assert "healthcheck" in SERVICES[name]


def test_containers_reach_the_host():
    """Prometheus and Alertmanager know the host by its name on Linux, too."""
    for name in ("prometheus", "alertmanager"):
        assert ["host.docker.internal:host-gateway"] == SERVICES[name]["extra_hosts"]


def test_paths_in_the_containers_fit_the_files():
    """Prometheus finds its rules and targets below its own file; Grafana gets the folders its files ask for."""
    configuration = ROOT / "dashboards" / "prometheus"
    parsed = yaml.safe_load((configuration / "prometheus.yml").read_text())
    patterns = [*parsed["rule_files"], *parsed["scrape_configs"][0]["file_sd_configs"][0]["files"]]
    assert all(list(configuration.glob(pattern)) for pattern in patterns)
    grafana = SERVICES["grafana"]
    places = {target for _, target, _ in (mount.split(":") for mount in grafana["volumes"] if mount.startswith("."))}
    assert {grafana["environment"]["MOE_DASHBOARDS"], "/etc/grafana/provisioning"} == places


# -- export -------------------------------------------------------------------------------------------------------


def test_export_writes_what_is_committed(tmp_path):
    """With no options the files are those of dashboards/."""
    done = command("export", tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    for path in export.files(Config()):
        assert (ROOT / "dashboards" / path).read_text() == (tmp_path / path).read_text()


def test_export_takes_a_site_s_values(tmp_path):
    """Job, datasource, threshold, runbook and targets arrive in the files."""
    done = command(
        *("export", tmp_path, "--job", "llm", "--datasource-uid", "abc123", "--threshold", "recall_low=0.4"),
        *("--runbook-url", "https://runbooks.example/moe", "--targets", "a:1,b:2", "--grafana-url", "http://g:3000"),
    )
    assert (0, "") == (done.returncode, done.stderr)
    rules = (tmp_path / "prometheus/rules/moe.yml").read_text()
    assert "< 0.4" in rules
    assert "https://runbooks.example/moe#moetargetdown" in rules
    prometheus = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())
    assert "llm" == prometheus["scrape_configs"][0]["job_name"]
    targets = yaml.safe_load((tmp_path / "prometheus/targets/hosts.yml").read_text())
    assert [["a:1"], ["b:2"]] == [entry["targets"] for entry in targets]
    assert "dashboard: http://g:3000/d/moe-overview" in rules
    assert not (tmp_path / "grafana/provisioning/datasources/moe.yml").exists()
    variables = json.loads((tmp_path / "grafana/moe-overview.json").read_text())["templating"]["list"]
    assert ["abc123"] == [each["current"]["value"] for each in variables if each["name"] == "datasource"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threshold", "recal=0.5"], "no threshold 'recal'"),
        (["--threshold", "recall_low=x"], "a number is expected"),
        (["--threshold", "recall_low"], "a number is expected"),
        (["--threshold", "recall_low=nan"], "a number is expected"),
        (["--threshold", "read_latency=0.08"], "bound"),
    ],
)
def test_a_bad_threshold_is_one_line(tmp_path, options, words):
    """What is not a threshold is named, and nothing is written."""
    done = command("export", tmp_path / "out", *options)
    assert 2 == done.returncode
    assert words in done.stderr
    assert 1 == len(done.stderr.splitlines())
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_one_line(tmp_path):
    """A folder below a file cannot be made."""
    (tmp_path / "file").write_text("")
    done = command("export", tmp_path / "file" / "out")
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines()))


@pytest.mark.parametrize(("text", "value"), [("5m", 300), ("90s", 90), ("1h30m", 5400), ("250ms", 0.25)])
def test_durations(text, value):
    """Prometheus durations are read, and written in their largest unit."""
    assert value == seconds(text)
    assert value == seconds(duration(value))


# -- check --------------------------------------------------------------------------------------------------------


def test_check_names_what_is_missing_and_what_is_empty_for_it():
    """A runtime without pool and predictor: which metrics lack, why, which panels and alerts lack with them."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        recorder.forward(1)
        recorder.union(0, 4)
        recorder.tokens(1)
        done = command("check", telemetry.url)
    assert (0, "") == (done.returncode, done.stderr)
    assert re.search(r"moe_expert_lookups_total: the runtime declares no pool", done.stdout)
    assert "empty panels of Overview: Decode hit rate; " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= check.WIDTH + len("MoeDecodeHitRateLow")
    assert re.search(r"cannot fire: .*MoeDecodeHitRateLow", done.stdout)
    assert re.search(r"moe_forward_duration_seconds: recorder.forward_done is not called", done.stdout)


def test_every_metric_that_can_lack_has_a_reason():
    """check knows why for each metric but those that telemetry always has."""
    always = {metric.name for metric in catalog.CATALOG if metric.name.startswith("moe.telemetry.")}
    assert set(catalog.BY_NAME) - always == set(reasons.WHY) >= set(reasons.MLX_LM)


def test_check_asks_for_flags_that_the_drop_in_reads():
    """Another variable would change nothing."""
    asked = set(re.findall(r"is (\w+)=1 set", " ".join(reasons.WHY.values())))
    read = set(re.findall(r'environ\.get\("(\w+)"\)', (ROOT / "src/moe_telemetry/profiling.py").read_text()))
    assert {"STREAM_PROF", "PREFETCH_TPROF"} == asked & read == asked


def test_check_says_why_one_layer_has_no_pool_curve():
    """Its ids come, but the first layer of four is not followed."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        recorder.forward(1)
        recorder.routed(0, {1, 2}, resident={1})
        done = command("check", telemetry.url)
    assert re.search(r"one of four, not the first.*:\n +moe_pool_simulated_lookups_total", done.stdout)


def test_check_says_that_without_tokens_no_ratio_alerts():
    """Layers and passes without tokens: which alerts are silent for it stands there."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        recorder.forward(1)
        recorder.routed(0, {1, 2}, resident={1}, predicted={1, 2}, ready={2})
        recorder.forward_done(0.1)
        done = command("check", telemetry.url)
    assert "without recorder.tokens no alert on a ratio can fire" in done.stdout
    silent = re.search(r"moe_tokens_total: .*\n.*cannot fire: (.*)", done.stdout)[1]
    assert {"MoePredictorRecallDrop", "MoeDecodeHitRateLow", "MoeHooksDetached"} <= set(silent.split(", "))


def test_check_leaves_out_alerts_that_can_fire_another_way():
    """MoeHooksDetached needs a declared pool in one of its alternatives only."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        recorder.forward(1)
        recorder.union(0, 4)
        recorder.tokens(1)
        done = command("check", telemetry.url)
    assert "MoeHooksDetached" not in done.stdout


def test_check_of_a_foreign_endpoint_is_one_line():
    """Metrics of something else are named as such."""
    from prometheus_client import CollectorRegistry

    from moe_telemetry.endpoint import Endpoint

    endpoint = Endpoint(CollectorRegistry(), dict, "127.0.0.1", 0)
    endpoint.serve()
    done = command("check", endpoint.url)
    endpoint.close()
    assert 2 == done.returncode
    assert re.fullmatch(r"moe-telemetry: \S+ is no endpoint of moe_telemetry: .*\n", done.stderr)


def test_check_knows_what_plain_mlx_lm_does_not_have():
    """Of a runtime without hooks of its own no hook is asked for: what lacks by its nature stands together, once."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder, runtime="mlx_lm") as telemetry:
        idle = command("check", telemetry.url)
        recorder.forward(1)
        recorder.union(0, 4)
        recorder.tokens(1)
        done = command("check", telemetry.url)
        recorder.pool(0, capacity=8)
        streaming = command("check", telemetry.url)
    assert "recorder." not in idle.stdout + done.stdout
    assert 2 == done.stdout.count("mlx_lm has all experts in memory")  # what is missing, and what is at 0
    assert re.search(r"mlx_lm has generated nothing so far:\n.*moe_tokens_total", idle.stdout)
    assert not re.search(r"generated nothing so far:\n.*moe_tokens_total", done.stdout)
    assert "mlx_lm has all experts in memory" not in streaming.stdout
    assert "recorder.prefetch is not called" in streaming.stdout


def test_check_suspects_a_missing_ready():
    """Predicted misses that are all timing, and no hit by prefetch, look like a `ready` that is not passed."""
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        recorder.forward(1)
        recorder.routed(0, {1, 2}, resident={1}, predicted={1, 2})
        done = command("check", telemetry.url)
    assert "does routed() get `ready`?" in done.stdout


def test_check_of_nothing_is_one_line():
    """An endpoint that is not there."""
    assert check.DEFAULT_URL == cli.build("check").parse_args(["check"]).url
    done = command("check", "127.0.0.1:1")
    assert 2 == done.returncode
    assert re.fullmatch(r"moe-telemetry: cannot scrape http://127.0.0.1:1/metrics: .*\n", done.stderr)


# -- stack --------------------------------------------------------------------------------------------------------


def test_stack_without_prometheus_is_one_line(tmp_path):
    """What is missing and how to get it."""
    done = command("stack", path=str(tmp_path))
    assert 2 == done.returncode
    assert "prometheus is not on PATH" in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_an_old_prometheus_is_one_line(tmp_path):
    """The version that is there and the one that is needed."""
    old = tmp_path / "prometheus"
    old.write_text("#!/bin/sh\necho 'prometheus, version 2.31.2+ds1 (branch: debian/sid)'\n")
    old.chmod(0o755)
    done = command("stack", path=f"{tmp_path}:/usr/bin:/bin")
    assert 2 == done.returncode
    assert "moe-telemetry: Prometheus 2.31 is too old: the rules need 2.42\n" == done.stderr


def test_grafana_is_started_past_its_packages_wrapper(tmp_path):
    """The binary of Grafana's home runs with our files and its own places for data, logs and plugins."""
    home = tmp_path / "grafana"
    (home / "public").mkdir(parents=True)
    (home / "bin").mkdir()
    for place in (home / "bin" / "grafana", tmp_path / "wrapper"):
        place.write_text(f'#!/bin/sh\necho "{place.name} $@" >{tmp_path}/ran\nenv >>{tmp_path}/ran\n')
        place.chmod(0o755)
    ports = dict.fromkeys(stack.PROGRAMS, 1)
    process = stack._start(stack.GRAFANA, str(home / "bin" / "grafana"), tmp_path / "files", tmp_path, ports)
    process.wait(10)
    ran = (tmp_path / "ran").read_text()
    assert ran.startswith(f"grafana server --homepath={home}\n")
    for name in ("GF_PATHS_PROVISIONING", "GF_PATHS_DATA", "GF_PATHS_LOGS", "GF_PATHS_PLUGINS", "MOE_DASHBOARDS"):
        assert f"{name}={tmp_path}" in ran


def test_the_demos_cache_belongs_to_its_user():
    """Each volume of the demo is mounted on a folder that the image makes for the demo's user."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    for mount in SERVICES["demo"]["volumes"]:
        assert f"install -d -o demo -g demo {mount.split(':')[1]}" in dockerfile


def test_stack_runs_what_is_installed_and_ends_it(tmp_path):
    """Prometheus and Alertmanager answer with our rules and targets; Ctrl-C ends both; Grafana's lack is one line."""
    binary()
    recorder = Recorder()
    with mt.start(port=0, recorder=recorder) as telemetry:
        line = ["stack", "--targets", f"127.0.0.1:{telemetry.port}", "--data", str(tmp_path)]
        ports = ["--prometheus-port", "0", "--alertmanager-port", "0", "--grafana-port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_telemetry", *line, *ports], stdout=subprocess.PIPE, text=True
        )
        guard = threading.Timer(60, process.kill)
        guard.start()
        lines: list[str] = []
        for text in process.stdout:
            lines.append(text)
            if text.startswith("Scraping"):
                break
        urls = dict(re.findall(r"(\w+): (http://\S+)", "".join(lines)))
        url = urls["Prometheus"]
        deadline = time.monotonic() + 30
        while not (found := _query(url, "moe_run_info")):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        groups = json.load(urllib.request.urlopen(f"{url}/api/v1/rules", timeout=5))["data"]["groups"]
        managers = json.load(urllib.request.urlopen(f"{url}/api/v1/alertmanagers", timeout=5))["data"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        guard.cancel()
    assert 0 == process.returncode
    assert 1 == len(found)
    assert {"moe.recording", "moe.alerts"} == {group["name"] for group in groups}
    assert [urls["Alertmanager"] + "/api/v2/alerts"] == [entry["url"] for entry in managers["activeAlertmanagers"]]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/-/ready", timeout=2)


def _query(url, expression):
    return json.load(urllib.request.urlopen(f"{url}/api/v1/query?query={expression}", timeout=5))["data"]["result"]
