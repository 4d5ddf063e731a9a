"""Writes the report of cells as one HTML file, and its charts as files."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from outrider.lab.cell_view import CellView, checked
from outrider.lab.frontier.document import dumps
from outrider.lab.plots import require_matplotlib
from outrider.lab.prediction import predictions_of
from outrider.lab.report.chart import Chart
from outrider.lab.report.charts import charts_of, nice_number
from outrider.lab.report.environment import environments
from outrider.lab.report.sweeps import sweep_charts
from outrider.lab.report.theme import variables
from outrider.lab.whole_file import write_whole

FORMATS = ("svg", "png")


def write_report(cells: Iterable[Any], path: Path, title: str = "Benchmark") -> None:
    """Writes one self-contained HTML file; the page needs no network.

    Args:
        cells: ``CellResult`` objects, their JSON, or views of them; at least one.
        path: of the file. It is replaced at once, so an interruption leaves the old one.
        title: of the page.

    Raises:
        CellFormatError: a cell has no environment, or not all of it.
        InvalidParameterError: no cells.
        MissingPlotsError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    views = _checked(cells)
    write_whole(path, render(views, title))


def write_charts(cells: Iterable[Any], folder: Path) -> list[Path]:
    """Writes every chart of the report as SVG and as PNG, in light colours; returns the paths.

    Args:
        cells: as :func:`write_report`.
        folder: created if it does not exist.

    Raises:
        CellFormatError, InvalidParameterError, MissingPlotsError, OSError: as
            :func:`write_report`.
    """
    views = _checked(cells)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    measured = [each for each in views if each.measured]
    groups = _settings(measured)
    for number, group in enumerate(groups, 1):
        prefix = f"{number}-" if len(groups) > 1 else ""
        paths += [path for chart in charts_of(group) for path in _save(chart, folder, prefix)]
    return paths + [path for chart in sweep_charts(measured) for path in _save(chart, folder, "")]


def render(views: Sequence[CellView], title: str) -> str:
    """The page as a string."""
    measured = [each for each in views if each.measured]
    number = 0

    def shown(charts: Iterable[Chart]) -> list[dict[str, Any]]:
        nonlocal number
        found = []
        for chart in charts:
            number += 1
            found.append({"chart": chart, "svg": Markup(chart.svg(f"c{number}"))})
        return found

    sections = [
        {"title": _setting_title(group[0]), "charts": shown(charts_of(group)), "cells": group}
        for group in _settings(measured)
    ]
    environment = Environment(
        loader=PackageLoader("outrider.lab.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = nice_number
    return environment.get_template("report.html").render(
        title=title,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=sections,
        sweeps=shown(sweep_charts(measured)),
        predictions=[_prediction_row(each) for each in predictions_of(views)],
        failed=[each for each in views if not each.measured],
        any_lossy=any(not each.lossless for each in views),
        unsteady=[each for each in measured if not each.steady],
        environments=environments(views),
        sampled=[each for each in _baseline_last(measured) if each.samples],
        raw=_script_json([dict(each.raw) for each in views]),
        light=Markup(variables("light")),
        dark=Markup(variables("dark")),
    )


def _checked(cells: Iterable[Any]) -> list[CellView]:
    views = checked(cells)
    require_matplotlib()
    return views


def _settings(views: Sequence[CellView]) -> list[list[CellView]]:
    """The cells by setting, each in the order of the plan, the baseline first."""
    groups: dict[tuple[str, float, int], list[CellView]] = {}
    for each in views:
        groups.setdefault(each.setting, []).append(each)
    return [sorted(group, key=lambda each: not each.is_baseline) for group in groups.values()]


def _baseline_last(views: Sequence[CellView]) -> list[CellView]:
    return sorted(views, key=lambda each: each.is_baseline)


def _setting_title(cell: CellView) -> str:
    return f"{cell.data}, temperature {cell.temperature:g}, batch size {cell.batch_size}"


def _prediction_row(each: Any) -> dict[str, Any]:
    found = each.shortfall()
    return {
        "cell": each.cell,
        "factors": each.factors,
        "measured": each.measured,
        "prefill": each.prefill,
        "ratios": found.ratios,
        "largest": found.largest,
    }


def _script_json(values: Sequence[Any]) -> Markup:
    """JSON that cannot end the script element that holds it, nor open a comment in it."""
    return Markup(dumps(values).replace("<", "\\u003c"))


def _save(chart: Chart, folder: Path, prefix: str) -> list[Path]:
    paths = [folder / f"{prefix}{chart.name}.{suffix}" for suffix in FORMATS]
    for path in paths:
        chart.save(path)
    return paths
