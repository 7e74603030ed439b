"""Dashboards as files: what frames the panels, provisioning, and that all of it is current."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("grafana_foundation_sdk")

import yaml
from dashboards_seen import panels, targets
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from moe_telemetry import catalog as c
from moe_telemetry.monitoring import rules
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.dashboards import NOT_SHOWN, build, files, panel_reference
from moe_telemetry.monitoring.panel_page import metrics

ROOT = Path(__file__).parent.parent
CONFIG = Config()
DASHBOARDS = build(CONFIG)
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


@each_dashboard
def test_dashboard_is_linked_to_the_others(dashboard):
    """One tag on all; a link to all of it that keeps time and variables and is shown, not hidden in a menu."""
    assert ["moe-telemetry"] == dashboard["tags"]
    (link,) = dashboard["links"]
    assert ("dashboards", ["moe-telemetry"], True, True) == (
        link["type"],
        link["tags"],
        link["includeVars"],
        link["keepTime"],
    )
    assert "placement" not in link


def test_uids_are_stable():
    """Links from alerts and bookmarks hold, and alerts link to dashboards that exist."""
    uids = ["moe-overview", "moe-prefetch", "moe-layers", "moe-host"]
    assert uids == [dashboard["uid"] for dashboard in DASHBOARDS.values()]
    linked = set(re.findall(r"/d/([\w-]+)", rules.render(CONFIG)))
    assert set() < linked <= set(uids)


@each_dashboard
def test_variables_of_all_dashboards_come_first(dashboard):
    """Datasource, job, model and instance, instance chained by the model, which the run info alone carries."""
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert ["datasource", "job", "model", "instance"] == list(variables)[:4]
    assert "prometheus" == variables["datasource"]["query"]
    assert (
        'label_values(moe_run_info{job=~"$job",model=~"$model"}, instance)' == variables["instance"]["query"]["query"]
    )


@each_dashboard
def test_job_is_there_before_its_first_run(dashboard):
    """The configured job is a choice as soon as Prometheus has its target, which `up` tells."""
    (job,) = [variable for variable in dashboard["templating"]["list"] if variable["name"] == "job"]
    assert 'up{job="moe"}' in job["query"]["query"]
    assert ["moe"] == re.findall(job["regex"].strip("/"), '{job="moe"} 1 1700000000000')


@each_dashboard
def test_each_used_variable_is_there_and_used(dashboard):
    """No query names a variable that the dashboard lacks, and no variable is for show."""
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard)))
    assert defined == used


def test_what_would_blend_is_single():
    """Phase, outcome and source have one value at a time, and never All."""
    found = {
        variable["name"]: (variable["multi"], variable["includeAll"])
        for dashboard in DASHBOARDS.values()
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "custom"
    }
    assert {"phase": (False, False), "outcome": (False, False), "source": (False, False)} == found


@each_dashboard
def test_alerts_and_run_starts_are_marked(dashboard):
    """A run start stands at the time that the run gives, not at that of the sample."""
    alerts, runs = dashboard["annotations"]["list"]
    assert alerts["expr"].startswith('ALERTS{alertstate="firing"')
    assert ('moe_run_start_time_seconds{job=~"$job",instance=~"$instance"} * 1000', True) == (
        runs["expr"],
        runs["useValueForTime"],
    )


def test_every_metric_is_used_or_has_a_reason_why_not():
    """By a panel or a rule; what is listed with a reason is used by neither."""
    expressions = [target["expr"] for _, target in targets(DASHBOARDS)]
    expressions += [rule["expr"] for group in rules.groups(CONFIG) for rule in group["rules"]]
    used = {metric.name for expression in expressions for metric in metrics(expression)}
    assert {metric.name for metric in c.CATALOG} - used == set(NOT_SHOWN)


@pytest.mark.parametrize("path", files(CONFIG))
def test_committed_files_are_current(path):
    """The files below dashboards/ are what the code makes: run `make generate`."""
    assert files(CONFIG)[path] == (ROOT / "dashboards" / path).read_text(encoding="utf-8")


def test_page_is_current():
    """docs/panels.md is what the code makes: run `make generate`."""
    assert panel_reference(CONFIG) == (ROOT / "docs" / "panels.md").read_text(encoding="utf-8")


def test_provisioning_reads_the_dashboards():
    """The datasource has the configured uid and scrape interval; the provider reads a folder of the environment's."""
    made = files(CONFIG)
    (source,) = yaml.safe_load(made["grafana/provisioning/datasources/moe.yml"])["datasources"]
    assert ("moe-prometheus", "5s", "${MOE_PROMETHEUS_URL}") == (
        source["uid"],
        source["jsonData"]["timeInterval"],
        source["url"],
    )
    (provider,) = yaml.safe_load(made["grafana/provisioning/dashboards/moe.yml"])["providers"]
    assert ("file", "${MOE_DASHBOARDS}") == (provider["type"], provider["options"]["path"])


def test_a_datasource_of_the_site_is_chosen_and_left_alone():
    """With another uid the dashboards begin with it, and nothing provisions a datasource over the site's own."""
    made = files(Config(datasource_uid="abc123"))
    assert files(CONFIG).keys() - made.keys() == {"grafana/provisioning/datasources/moe.yml"}
    for name in DASHBOARDS:
        (datasource,) = [
            variable
            for variable in json.loads(made[f"grafana/{name}"])["templating"]["list"]
            if variable["name"] == "datasource"
        ]
        assert {"selected": True, "text": "abc123", "value": "abc123"} == datasource["current"]


@each_dashboard
def test_dashboard_is_what_the_sdks_types_say(dashboard):
    """Read into the SDK's models and written again it is the same: no field that they do not know."""
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    for entry in [*again["links"], *again["annotations"]["list"]]:
        del entry["placement"]
    assert again == dashboard


@each_dashboard
def test_import_by_hand_needs_no_inputs(dashboard):
    """No __inputs, no id of another Grafana's, and the configured uid nowhere."""
    assert set() == {"__inputs", "__requires", "id"} & set(dashboard)
    assert CONFIG.datasource_uid not in json.dumps(dashboard)


def test_page_has_each_panel_once():
    """Those of the prefill rows are said to be the decode rows' for prefill."""
    page = panel_reference(CONFIG)
    titles = [panel["title"] for dashboard in DASHBOARDS.values() for panel in panels(dashboard)]
    assert sorted(title for title in titles if not title.startswith("Prefill: ")) == sorted(
        re.findall(r"^#### (.*)$", page, re.MULTILINE)
    )
    assert 2 == page.count('with `phase="prefill"`, as points.')


def test_descriptions_name_alerts_that_exist():
    """An alert that a panel sends the reader to is one of the rules."""
    alerts = {rule["alert"] for group in rules.groups(CONFIG) for rule in group["rules"] if "alert" in rule}
    named = set(re.findall(r"\bMoe[A-Z]\w+", panel_reference(CONFIG)))
    assert set() < named <= alerts
