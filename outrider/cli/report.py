"""``outrider report``: measured cells as one HTML or Markdown file, and as charts for papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.errors import fail
from outrider.cli.options.output import OUTPUT
from outrider.cli.progress import Progress
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab.bench import CellResult

TITLE = "Benchmark"
MARKDOWN = ".md"


def report(
    cells: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A cells.jsonl, or the folder of outrider bench that holds one."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: HTML, or tables in Markdown if its name ends in .md.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("report.html"),
    charts: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write every chart as SVG and PNG into this folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    title: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Title of the page.", rich_help_panel=OUTPUT),
    ] = TITLE,
) -> None:
    """Write the report of a benchmark: one HTML file with charts, samples and the raw data.

    The page needs no network and fits a phone's screen. It states the hardware, versions, commit
    and command of every cell, and marks lossy methods wherever their speed is shown:

      outrider report results/ -o report.html --charts figures/

    A name that ends in .md gives the tables alone, in Markdown, for READMEs and issues.

    HTML and charts need matplotlib: pip install "outrider[bench]".
    """
    check_page(output, "--output")
    start("outrider.lab.bench")
    from outrider.lab.bench import read_cells

    write_page(read_cells(cells), output, title, charts)


def check_page(page: Path, flag: str) -> None:
    """Fails, before any work, if the page cannot be written.

    Args:
        page: the file.
        flag: the option that names it, for messages.
    """
    if page.is_dir():
        raise fail(f"{flag} {page}: is a folder; pass the name of a file")
    if not page.absolute().parent.is_dir():
        raise fail(f"{flag} {page}: there is no folder {page.parent}")
    if page.suffix != MARKDOWN:
        from outrider.lab.plots import require_matplotlib

        require_matplotlib()


def write_page(
    results: "Sequence[CellResult]", page: Path, title: str = TITLE, charts: Path | None = None
) -> None:
    """Writes the page, and the charts into their folder, and says so."""
    from outrider.lab.report import write_charts, write_markdown, write_report

    with Progress() as progress:
        try:
            progress.show("drawing the report")
            write = write_markdown if page.suffix == MARKDOWN else write_report
            write(results, page, title)
            if charts is not None:
                write_charts(results, charts)
        except OSError as error:
            raise fail(f"cannot write '{error.filename}': {error.strerror or error}") from error
    typer.echo(f"wrote {page}{'' if charts is None else f' and charts in {charts}'}", err=True)
