"""The report: self-contained, escaped, with its environment, and with lossy methods marked."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_cells
import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.pareto import pareto_front
from outrider.lab.cell_view import CellFormatError, view
from outrider.lab.report import write_charts, write_report
from outrider.lab.report.charts import charts_of
from outrider.lab.report.sweeps import sweep_charts
from outrider.lab.report.theme import COLOURS, inline

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The parts of a page that tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.classes: dict[str, list[str]] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._open.append((tag, values.get("class", "")))
        self.attributes += [(tag, name, value) for name, value in values.items()]
        if "id" in values:
            self.ids.append(values["id"])

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, name = self._open[-1] if self._open else ("", "")
        if tag == "script":
            self.scripts.append(data)
        elif tag != "style":
            self.words.append(data)
            self.classes.setdefault(name, []).append(data)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = bench_cells.few()
    cells[1]["cell"]["title"] = f"speculative {HOSTILE}"
    cells[1]["samples"][0]["prompt"] = HOSTILE
    cells[1]["metrics"]["divergence"] = {"kl": math.inf}
    cells[1]["samples"][0]["pieces"].append([HOSTILE, "a"])
    cells[1]["repeats"][0]["batches"][0]["requests"][0]["text"] = f"</script>{HOSTILE}<!--"
    cells.append(failed())
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_report(cells, file, f"Title {HOSTILE}")
    assert [each.name for each in file.parent.iterdir()] == ["report.html"]
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def failed() -> dict[str, Any]:
    cell = bench_cells.cell("mjsd", gamma=4, lossless=False)
    empty = {"speed": {}, "speedup": None, "repeats": [], "samples": []}
    return cell | empty | {"error": "out of memory: try a smaller batch"}


def test_the_page_needs_no_network(text: str, page: Page) -> None:
    assert not re.findall(r"(?:https?:)?//[a-z0-9]", text.replace("\\u003c/", ""))
    loading = [(tag, name) for tag, name, _ in page.attributes if name in ("src", "srcset", "data")]
    assert loading == []
    assert "@import" not in text
    links = [value for _, name, value in page.attributes if name == "href"]
    assert links
    assert all(value.startswith("#") for value in links)


def test_links_inside_the_page_have_targets_and_ids_are_unique(page: Page) -> None:
    assert len(set(page.ids)) == len(page.ids)
    links = [value[1:] for _, name, value in page.attributes if name == "href"]
    urls = [
        target
        for _, _, value in page.attributes
        for target in re.findall(r"url\(#([^)]+)\)", value)
    ]
    assert set(links + urls) <= set(page.ids)


def test_output_of_models_is_escaped(text: str, page: Page) -> None:
    """The only scripts are the page's own two: its data and its code."""
    assert len(page.scripts) == 2
    assert "<script>alert" not in text
    shown = "".join(page.words)
    assert shown.count(HOSTILE) >= 4  # title twice, prompt, piece
    assert HOSTILE in "".join(page.classes["accepted"])


def test_the_raw_data_are_complete(page: Page) -> None:
    cells = json.loads(page.scripts[0], parse_constant=pytest.fail)  # browsers know no Infinity
    assert cells[1]["metrics"]["divergence"] == {"kl": "inf"}
    assert [each["cell"]["title"] for each in cells[2:]] == ["mentored:budget=0.2", "mjsd"]
    expected = bench_cells.few()[2]
    assert cells[2] == json.loads(json.dumps(expected))
    found = cells[1]["repeats"][0]["batches"][0]["requests"][0]["text"]
    assert found == f"</script>{HOSTILE}<!--"


def test_the_environment_is_stated(page: Page) -> None:
    shown = "".join(page.words)
    for value in ("AMD EPYC", "0123456789ab", "outrider bench --plan plan.toml", "torch 2.13.0"):
        assert value in shown


@pytest.mark.parametrize("name", ["hardware", "versions", "commit", "command"])
def test_without_its_environment_there_is_no_report(tmp_path: Path, name: str) -> None:
    cells = bench_cells.few()
    kept = {key: value for key, value in bench_cells.ENVIRONMENT.items() if key != name}
    cells[1]["environment"] = kept
    with pytest.raises(CellFormatError, match=f"speculative, γ 4: its environment lacks {name}"):
        write_report(cells, tmp_path / "report.html")
    with pytest.raises(CellFormatError, match=name):
        write_charts(cells, tmp_path / "charts")
    assert list(tmp_path.iterdir()) == []


def test_lossy_methods_are_marked_wherever_their_speed_is_shown(text: str, page: Page) -> None:
    """Every mention of the method outside of scripts, attributes and the environment is followed
    by the mark."""
    body = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    body = body[: body.index('id="environment"')]
    visible = re.sub(r"<[^>]+>", "", body)
    mentions = [match.end() for match in re.finditer(r"mentored:budget=0\.2", visible)]
    assert len(mentions) >= 8
    for end in mentions:
        assert re.match(r"(, γ 4)?\s*\(?lossy", visible[end : end + 40]), visible[end : end + 40]
    assert "do not have exactly the target" in visible


def test_lossless_methods_are_not_marked(tmp_path: Path) -> None:
    write_report(bench_cells.few()[:2], tmp_path / "report.html")
    body = (tmp_path / "report.html").read_text(encoding="utf-8")
    visible = re.sub(r"<(script|style).*?</\1>", "", body, flags=re.DOTALL)
    assert "lossy" not in re.sub(r"<[^>]+>", "", visible).replace("lossy rules", "")
    assert 'pattern id="' not in visible  # no hatched bar


def test_estimates_of_energy_are_labelled(page: Page) -> None:
    shown = "".join(page.words)
    assert "Energy against speed: energy-model (estimate)" in shown
    assert "estimate by a two-term model with joules_per_byte 1e-10" in shown
    assert len(re.findall(r"0\.\d{4} \(estimate\)", shown)) == 3


def test_time_and_acceptance_are_split(text: str) -> None:
    """The shares of draft, target and the rest add up to 1, and plain decoding drafts nothing."""
    rows = table_rows(text, "share of the time")
    assert rows[0] == ["draft passes", "target passes", "the rest"]
    assert all(sum(map(float, row)) == pytest.approx(1, abs=0.015) for row in rows[1:])
    assert rows[1][0] == "0.00"
    assert table_rows(text, "acceptance by class of token")[0] == ["digit"]
    assert {row[0] for row in table_rows(text, "acceptance by class of token")[1:]} == {"0.88"}


def table_rows(text: str, title: str) -> list[list[str]]:
    """The cells of a table besides its first column, the head first."""
    (table,) = (
        part for part in text.split("<table>") if part.strip().startswith(f"<thead><tr><th>{title}")
    )
    rows = table.split("</table>")[0].split("<tr>")[1:]
    return [
        re.findall(r"<t[hd]>([^<]*)</t[hd]>", row.replace(f"<th>{title}</th>", "")) for row in rows
    ]


def test_a_cell_that_failed_is_named_with_its_error(page: Page) -> None:
    shown = " ".join("".join(page.words).split())
    assert "mjsd, γ 4 lossy, code: out of memory: try a smaller batch" in shown


def test_all_colours_of_charts_follow_the_mode(text: str) -> None:
    """No chart has a colour of its own, except the black that clips and hatches use."""
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(charts) >= 5
    found = {colour for chart in charts for colour in re.findall(r"#[0-9a-f]{6}\b", chart)}
    assert found <= {"#000000"}
    for name in COLOURS:
        assert text.count(f"--{name}: ") == 3  # light, dark, and dark by the button


def test_the_page_fits_a_phone(text: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    for chart in re.findall(r"<svg[^>]*>", text):
        assert "viewBox" in chart
        assert not re.search(r"\b(width|height)=", chart)


def test_charts_are_saved_without_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    paths = write_charts(bench_cells.few(), tmp_path / "charts")
    names = {path.name for path in paths}
    assert {"speed.svg", "speed.png", "acceptance.svg", "latency.png", "prediction.svg"} <= names
    assert {"quality-perplexity-macro.svg", "energy-energy-model.png"} <= names
    assert names == {path.name for path in (tmp_path / "charts").iterdir()}
    for path in paths:
        head = path.read_bytes()[:64]
        assert head.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    svg = (tmp_path / "charts" / "speed.svg").read_text(encoding="utf-8")
    assert "mentored:budget=0.2, γ 4 (lossy)" in svg
    assert "var(--" not in svg
    first = {path.name: path.read_bytes() for path in paths}
    again = write_charts(bench_cells.few(), tmp_path / "again")
    assert {path.name: path.read_bytes() for path in again} == first


def test_without_a_baseline_the_bars_show_tokens_per_second() -> None:
    cells = [bench_cells.cell("speculative", alpha=0.7, gamma=4) | {"speedup": None}]
    charts = list(charts_of([view(each) for each in cells]))
    assert charts[0].title == "Tokens per second"
    assert "slowest" in charts[0].note


def test_many_series_are_spread_over_several_charts() -> None:
    cells = [bench_cells.plain()]
    cells += [bench_cells.cell(f"method-{i}", alpha=0.5, gamma=2) for i in range(9)]
    charts = [each.name for each in charts_of([view(each) for each in cells])]
    assert charts == ["speed", "acceptance-1", "acceptance-2", "latency"]


def test_what_is_varied_gets_a_chart() -> None:
    def names(cells: list[dict[str, Any]]) -> list[str]:
        return [each.name for each in sweep_charts([view(each) for each in cells])]

    cells = [bench_cells.plain(), bench_cells.cell("speculative", alpha=0.7, gamma=2)]
    assert names(cells) == ["prediction"]
    cells.append(bench_cells.cell("speculative", alpha=0.7, gamma=4))
    assert names(cells) == ["gamma", "prediction"]
    cells.append(bench_cells.plain(batch_size=4))
    cells.append(bench_cells.cell("speculative", alpha=0.7, gamma=4, batch_size=4))
    assert names(cells) == ["gamma", "batch", "prediction"]
    assert names(cells[1:2]) == []


@pytest.mark.parametrize(
    ("points", "options", "front"),
    [
        ([(1, 1), (2, 2), (3, 1)], {}, [1, 2]),
        ([(1, 1), (2, 2), (3, 1)], {"x_lower": True}, [0, 1]),
        ([(1, 3), (2, 2), (2, 1)], {"x_lower": True, "y_lower": True}, [0, 2]),
        ([(1, 1), (1, 1)], {}, [0, 1]),
        ([(1, 1), (1, 2)], {}, [1]),
        ([], {}, []),
    ],
)
def test_the_pareto_front(
    points: list[tuple[float, float]], options: dict[str, bool], front: list[int]
) -> None:
    assert pareto_front(points, **options) == front


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": {}}, "it has no 'lossless'"),
        ({"repeats": None}, "is no cell of a benchmark"),
    ],
)
def test_what_is_no_cell_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CellFormatError, match=message):
        view(bench_cells.plain() | change)


def test_a_report_needs_a_cell(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="at least one cell"):
        write_report([], tmp_path / "report.html")


def test_infinite_and_missing_numbers_are_left_out() -> None:
    metrics = {"divergence": {"kl": "inf", "tv": 0.1, "measured_tokens": 9}, "mine": {"score": 2.0}}
    found = view(bench_cells.plain(metrics=metrics))
    assert dict(found.metrics) == {"divergence tv": 0.1, "mine score": 2.0}
    assert found.charted == ("mine score",)


def test_a_divergence_that_was_not_measured_is_not_zero() -> None:
    """Lossless methods have none; of a rule on whole paths none can be measured."""
    metrics = {"divergence": {"kl": 0.0, "measured_tokens": 0}}
    assert dict(view(bench_cells.plain(metrics=metrics)).metrics) == {"divergence kl": 0.0}
    lossy = bench_cells.cell("mjsd", gamma=4, lossless=False, metrics=metrics)
    assert dict(view(lossy).metrics) == {}


def test_a_meter_that_failed_in_a_repeat_counts_the_others() -> None:
    cell = bench_cells.plain(joules=0.5)
    cell["repeats"][0]["readings"]["energy-model"]["estimate"] = False
    broken = json.loads(json.dumps(cell["repeats"][0]))
    broken["readings"]["energy-model"] = {"joules": None, "error": "gone"}
    cell["repeats"].append(broken)
    (energy,) = view(cell).energy.values()
    assert energy.joules == pytest.approx(0.5)
    assert energy.above_idle == pytest.approx(0.4)
    cell["repeats"] = [broken]
    assert view(cell).energy == {}


def test_references_inside_an_svg_get_the_prefix() -> None:
    svg = (
        '<?xml version="1.0"?><!DOCTYPE svg><svg width="9pt" xmlns="http://x.org/s" '
        'viewBox="0 0 1 1"><metadata>m</metadata><g id="a" style="stroke: #1b1f24"/>'
        '<use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    assert inline(svg, "c1", "Speed") == (
        '<svg viewBox="0 0 1 1" role="img" aria-label="Speed"><g id="c1-a" '
        'style="stroke: var(--ink)"/><use href="#c1-a" clip-path="url(#c1-a)"/></svg>'
    )
