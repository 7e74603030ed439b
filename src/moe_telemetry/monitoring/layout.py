"""Where panels stand, and the frame around them: rows, variables, annotations, links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import prometheus as pm

from moe_telemetry import catalog as c

from .config import Config, duration
from .expressions import RANGE, SCOPE
from .kit import DATASOURCE
from .promql import select

COLUMNS = 24
TAG = "moe-telemetry"


@dataclass(frozen=True)
class Band:
    """Panels side by side: their height, and each with its width."""

    height: int
    panels: tuple[tuple[d.Panel, int], ...]


@dataclass(frozen=True)
class Section:
    """A titled row of the dashboard, or without a title the panels at its head."""

    title: str
    bands: tuple[Band, ...]
    collapsed: bool = False


def arrange(sections: Sequence[Section]) -> list[d.Panel | d.RowPanel]:
    """Panels with positions and ids; those of a collapsed row stand inside it, as Grafana stores them, and it is the
    last one: what follows would stand in the place of its panels."""
    if any(section.collapsed for section in sections[:-1]):
        raise ValueError("a collapsed row must be the last")
    found: list[d.Panel | d.RowPanel] = []
    y, number = 0, 0
    for section in sections:
        into: list[d.Panel] = []
        if section.title:
            number += 1
            row = d.RowPanel(section.collapsed, section.title, grid_pos=d.GridPos(1, COLUMNS, 0, y), id_val=number)
            found.append(row)
            y += 1
        for band in section.bands:
            x = 0
            for panel, width in band.panels:
                number += 1
                panel.id_val, panel.grid_pos = number, d.GridPos(band.height, width, x, y)
                into.append(panel)
                x += width
            if x > COLUMNS:
                raise ValueError(f"{section.title or 'the head'}: {x} columns side by side")
            y += band.height
        if section.collapsed:
            row.panels = into
        else:
            found += into
    return found


def _query(
    name: str, label: str, query: str, sort: d.VariableSort = d.VariableSort.ALPHABETICAL_ASC
) -> d.VariableModel:
    variable = (
        build.QueryVariable(name)
        .label(label)
        .query({"query": query, "refId": "StandardVariableQuery"})
        .definition(query)
    )
    variable.datasource(DATASOURCE).sort(sort).refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.multi(True).include_all(True).current(d.VariableOption(True, ["All"], ["$__all"]))
    return variable.build()


def chosen(name: str, label: str, values: Sequence[str], first: str) -> d.VariableModel:
    """One of a closed set of values; never all of them, since that would blend them."""
    options = [d.VariableOption(value == first, value, value) for value in values]
    variable = build.CustomVariable(name).label(label).values(",".join(values)).options(options)
    return variable.multi(False).include_all(False).current(d.VariableOption(True, first, first)).build()


def layers() -> d.VariableModel:
    """The layers that there are, in numerical order."""
    query = f"label_values({select(c.LAYER_CALLS, *SCOPE)}, layer)"
    return _query("layer", "Layer", query, d.VariableSort.NUMERICAL_ASC)


def _variables(config: Config) -> list[d.VariableModel]:
    """Datasource, job, model and instance: the metrics carry no model, so it chooses among instances."""
    datasource = build.DatasourceVariable("datasource").label("Datasource").type("prometheus")
    if config.datasource_uid != Config.datasource_uid:
        datasource.current(d.VariableOption(True, config.datasource_uid, config.datasource_uid))
    # Runs of any job, and the configured one as soon as Prometheus has it as a target: "Up" says why no run comes.
    runs, targets = c.RUN_INFO.prometheus, f"up{{job={json.dumps(config.job)}}}"
    known = " or ".join(f"group by (job) (last_over_time({series}[{RANGE}]))" for series in (runs, targets))
    job = _query("job", "Job", f"query_result({known})")
    job.regex = '/job="([^"]+)"/'
    # One at a time: two jobs may scrape one instance, whose figures would then add up.
    job.multi, job.include_all, job.current = False, False, d.VariableOption(True, config.job, config.job)
    of_job = select(c.RUN_INFO, SCOPE[0])
    of_model = select(c.RUN_INFO, SCOPE[0], model="$model")
    return [
        datasource.build(),
        job,
        _query("model", "Model", f"label_values({of_job}, model)"),
        _query("instance", "Instance", f"label_values({of_model}, instance)"),
    ]


def _annotation(name: str, colour: str, expr: str, title: str, text: str, tags: str) -> d.AnnotationQuery:
    target = prometheus.Dataquery().ref_id("Anno").expr(expr).datasource(DATASOURCE).range()
    annotation = build.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour).hide(False)
    annotation.target(target.editor_mode(pm.QueryEditorMode.CODE)).expr(expr)
    annotation.title_format(title).text_format(text).tag_keys(tags)
    return annotation.build()


def _marks() -> list[d.AnnotationQuery]:
    """Firing alerts, and the starts of runs at the time that the run itself gives."""
    alerts = f'ALERTS{{alertstate="firing",{",".join(SCOPE)}}}'
    firing = _annotation("Alerts", "red", alerts, "{{alertname}}", "{{severity}} {{instance}} {{phase}}", "alertname")
    start = f"{select(c.RUN_START_TIME, *SCOPE)} * 1000"
    runs = _annotation("Run starts", "blue", start, "Run starts", "{{instance}}", "instance")
    runs.use_value_for_time = True
    return [firing, runs]


def _links() -> list[d.DashboardLink]:
    """The other dashboards, side by side above the panels."""
    link = build.DashboardLink("Dashboards").type(d.DashboardLinkType.DASHBOARDS).tags([TAG]).icon("external link")
    return [link.as_dropdown(False).include_vars(True).keep_time(True).target_blank(False).build()]


def dashboard(
    config: Config,
    uid: str,
    title: str,
    text: str,
    sections: Sequence[Section],
    variables: Sequence[d.VariableModel] = (),
) -> dict[str, Any]:
    """A whole dashboard as plain data."""
    frame = build.Dashboard(f"MoE: {title}").uid(uid).description(text).tags([TAG]).editable()
    frame.time("now-1h", "now").refresh(duration(max(10, config.windows.scrape))).timezone("browser")
    frame.tooltip(d.DashboardCursorSync.CROSSHAIR)
    model = frame.build()
    model.panels = arrange(sections)
    model.templating = d.DashboardDashboardTemplating([*_variables(config), *variables])
    model.annotations = d.AnnotationContainer(_marks())
    model.links = _links()
    plain: dict[str, Any] = json.loads(json.dumps(model, cls=JSONEncoder))
    for entry in [*plain["links"], *plain["annotations"]["list"]]:
        # The SDK moves both into a menu, where nobody looks for the other dashboards.
        del entry["placement"]
    return plain
