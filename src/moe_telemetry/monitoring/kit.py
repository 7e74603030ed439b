"""Panels through the Grafana SDK: what every panel has, and the few kinds there are.

The SDK sets neither ids nor refIds nor a position in the grid: layout.py and `_target` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Protocol, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, statushistory
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders import timeseries as series
from grafana_foundation_sdk.cog import builder as cog
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.models import common as m
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as pm

from .promql import one_line

DATASOURCE = m.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""A variable, so that the files work whatever uid a site's datasource has."""

GREEN, YELLOW, ORANGE, RED, GREY = "green", "yellow", "orange", "red", "#8e8e8e"
OUTCOME_COLOURS = {"hit": GREEN, "miss_timing": YELLOW, "miss_evicted": ORANGE, "miss_unpredicted": RED}
USUAL = "usual"
"""A legend that begins so is drawn as a thin grey line, one that begins with a word of LIMITS as a dashed one."""
LIMITS = ("peak", "smallest pool")


@dataclass(frozen=True)
class Query:
    """A query and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class About:
    """What every panel says: title, what to do when it looks bad, the unit, and why there may be no data."""

    title: str
    text: str
    unit: str
    none: str
    decimals: int | None = None


@dataclass(frozen=True)
class Bad:
    """Where a value begins to be bad, on the side `below` or above it."""

    value: float
    below: bool = False


class _Target(Protocol):
    """What all kinds of panel take."""

    def title(self, title: str) -> _Target: ...
    def description(self, description: str) -> _Target: ...
    def unit(self, unit: str) -> _Target: ...
    def no_value(self, no_value: str) -> _Target: ...
    def decimals(self, decimals: float) -> _Target: ...
    def datasource(self, datasource: m.DataSourceRef) -> _Target: ...
    def with_target(self, target: cog.Builder[variants.Dataquery]) -> _Target: ...


Builder = TypeVar("Builder", bound=_Target)


def _begin(
    builder: Builder, about: About, queries: Sequence[Query], instant: bool, format_: pm.PromQueryFormat
) -> Builder:
    builder.title(about.title).description(about.text).unit(about.unit).no_value(about.none).datasource(DATASOURCE)
    if about.decimals is not None:
        builder.decimals(about.decimals)
    for ref, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().ref_id(ref).expr(one_line(query.expr)).legend_format(query.legend)
        target.format(format_).editor_mode(pm.QueryEditorMode.CODE).datasource(DATASOURCE)
        builder.with_target(target.instant() if instant else target.range())
    return builder


def _steps(bads: Sequence[Bad], good: str = GREEN) -> dashboard.ThresholdsConfig:
    """Colours by value; one `below` bound, or any number of bounds above."""
    if bads and bads[0].below:
        steps = [d.Threshold(None, RED), d.Threshold(bads[0].value, good)]
    else:
        steps = [d.Threshold(None, good), *(d.Threshold(bad.value, RED) for bad in bads)]
    return dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps)


def _marks(bads: Sequence[Bad]) -> dashboard.ThresholdsConfig:
    """Dashed red lines, whatever their good side: the lines take their colour from the step that begins there."""
    steps = [d.Threshold(None, "transparent"), *(d.Threshold(value, RED) for value in sorted(b.value for b in bads))]
    return dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps)


def _idle() -> list[d.ValueMap | d.RangeMap | d.RegexMap | d.SpecialValueMap]:
    """A quantile of no observations is NaN."""
    result = d.ValueMappingResult(text="idle", index=0)
    return [d.SpecialValueMap(d.DashboardSpecialValueMapOptions(d.SpecialValueMatch.NA_N, result))]


def _colour(name: str) -> d.DynamicConfigValue:
    return d.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": name})


def _begins(word: str) -> str:
    """Regular expression of the legends that begin with a word."""
    return f"/^{word}( |$)/"


def timeseries(
    about: About,
    *queries: Query,
    points: bool = False,
    stack: m.StackingMode | None = None,
    bads: Sequence[Bad] = (),
    top: float | None = None,
    colours: dict[str, str] | None = None,
) -> d.Panel:
    """Lines over time with gaps where there is no value; points where values come in bursts, which nobody could read
    stacked."""
    stack = None if points else stack
    panel = _begin(series.Panel(), about, queries, False, pm.PromQueryFormat.TIME_SERIES)
    panel.span_nulls(False).line_width(1).fill_opacity(0 if stack is None else 40).min(0)
    panel.color_scheme(dashboard.FieldColor().mode(d.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(m.LegendDisplayMode.LIST)
        .placement(m.LegendPlacement.BOTTOM)
    )
    panel.tooltip(common.VizTooltipOptions().mode(m.TooltipDisplayMode.MULTI).sort(m.SortOrder.DESCENDING))
    panel.draw_style(m.GraphDrawStyle.POINTS if points else m.GraphDrawStyle.LINE).point_size(5)
    panel.show_points(m.VisibilityMode.ALWAYS if points else m.VisibilityMode.AUTO)
    if stack is not None:
        panel.stacking(common.StackingConfig().mode(stack).group("A"))
    if top is not None:
        panel.max(top)
    panel.thresholds(_marks(bads))
    style = m.GraphThresholdsStyleMode.DASHED if bads else m.GraphThresholdsStyleMode.OFF
    panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    for prefix, colour in (colours or {}).items():
        panel.override_by_regexp(_begins(prefix), [_colour(colour)])
    drawn = [_colour(GREY), d.DynamicConfigValue("custom.fillOpacity", 0)]
    unstacked = d.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"})
    as_line = d.DynamicConfigValue("custom.drawStyle", "line")
    for prefix, dash in ((USUAL, None), *((limit, [8, 6]) for limit in LIMITS)):
        if any(query.legend.startswith(prefix) for query in queries):
            line = [] if dash is None else [d.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": dash})]
            no_points = d.DynamicConfigValue("custom.showPoints", "never")
            panel.override_by_regexp(_begins(prefix), [*drawn, unstacked, as_line, no_points, *line])
    return panel.build()


def number(
    about: About,
    *queries: Query,
    bads: Sequence[Bad] = (),
    name: bool = False,
    texts: dict[str, tuple[str, str]] | None = None,
    plain: bool = False,
    others: dict[str, Bad] | None = None,
) -> d.Panel:
    """The value now: absent when idle, since an older one would look current. `name` shows the legend only, `texts`
    maps values to a text and a colour, `plain` values are neither good nor bad, `others` are what is bad of the series
    whose legend begins so."""
    panel = _begin(stat.Panel(), about, queries, True, pm.PromQueryFormat.TIME_SERIES)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    mode = m.BigValueTextMode.VALUE_AND_NAME if len(queries) > 1 else m.BigValueTextMode.AUTO
    panel.text_mode(m.BigValueTextMode.NAME if name else mode)
    panel.graph_mode(m.BigValueGraphMode.NONE)
    panel.color_mode(m.BigValueColorMode.NONE if plain or name else m.BigValueColorMode.VALUE)
    panel.thresholds(_steps(bads))
    shown = {value: d.ValueMappingResult(text, colour) for value, (text, colour) in (texts or {}).items()}
    panel.mappings([*_idle(), *([d.ValueMap(shown)] if shown else [])])
    for prefix, bad in (others or {}).items():
        panel.override_by_regexp(_begins(prefix), [d.DynamicConfigValue("thresholds", _steps([bad]).build())])
    return panel.build()


def history(about: About, query: Query, bads: Sequence[Bad] = (), scheme: d.FieldColorModeId | None = None) -> d.Panel:
    """One row of cells a series: what a layer did over time. Too many cells are drawn as a message, hence the limit."""
    panel = _begin(statushistory.Panel(), about, [query], False, pm.PromQueryFormat.TIME_SERIES)
    panel.max_data_points(80).show_value(m.VisibilityMode.NEVER).row_height(0.9).col_width(1.0).thresholds(_steps(bads))
    panel.color_scheme(dashboard.FieldColor().mode(scheme or d.FieldColorModeId.THRESHOLDS))
    panel.legend(common.VizLegendOptions().show_legend(False).display_mode(m.LegendDisplayMode.LIST))
    if about.unit == "percentunit":
        panel.min(0).max(1)
    return panel.build()


def bars(about: About, query: Query, bads: Sequence[Bad] = ()) -> d.Panel:
    """One bar a series: its last value. Over the range, since the series of an instant query come in no order."""
    panel = _begin(bargauge.Panel(), about, [query], False, pm.PromQueryFormat.TIME_SERIES)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel.orientation(m.VizOrientation.HORIZONTAL).display_mode(m.BarGaugeDisplayMode.BASIC).min(0)
    panel.thresholds(_steps(bads)).mappings(_idle())
    return panel.build()


def table(about: About, query: Query, hidden: Sequence[str], names: dict[str, str], sort: str = "") -> d.Panel:
    """Series as rows, their labels as columns, now; without the columns `hidden`, others renamed."""
    panel = _begin(tables.Panel(), about, [query], True, pm.PromQueryFormat.TABLE)
    options = {"excludeByName": dict.fromkeys(hidden, True), "renameByName": names}
    panel.with_transformation(d.DataTransformerConfig(id_val="organize", options=options))
    if sort:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(False)])
    return panel.build()


def heat_map(about: About, query: Query) -> d.Panel:
    """A histogram over time; the format makes Grafana take cumulative buckets apart."""
    panel = _begin(heatmap.Panel(), about, [query], False, pm.PromQueryFormat.HEATMAP)
    panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(about.unit))
    colour = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    panel.color(colour.scale(heat.HeatmapColorScale.EXPONENTIAL).exponent(0.5).fill("dark-orange"))
    panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    return panel.build()
