"""``outrider report``: measured cells as one HTML file, and as charts for papers."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.errors import fail
from outrider.cli.options.output import OUTPUT
from outrider.cli.progress import Progress
from outrider.cli.start import start


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
            help="The HTML file to write.",
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
    ] = "Benchmark",
) -> None:
    """Write the report of a benchmark: one HTML file with charts, samples and the raw data.

    The page needs no network and fits a phone's screen. It states the hardware, versions, commit
    and command of every cell, and marks lossy methods wherever their speed is shown:

      outrider report results/ -o report.html --charts figures/

    Needs matplotlib: pip install "outrider[bench]".
    """
    if not output.absolute().parent.is_dir():
        raise fail(f"--output {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise fail(f"--output {output}: is a folder; pass the name of a file")
    start("outrider.lab.bench")
    from outrider.lab.bench import read_cells
    from outrider.lab.report import write_charts, write_report

    found = read_cells(cells)
    with Progress() as progress:
        try:
            progress.show("drawing the page")
            write_report(found, output, title)
            if charts is not None:
                progress.show("drawing charts")
                write_charts(found, charts)
        except OSError as error:
            raise fail(f"cannot write '{error.filename}': {error.strerror or error}") from error
    typer.echo(f"wrote {output}{'' if charts is None else f' and charts in {charts}'}", err=True)
