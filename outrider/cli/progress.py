"""Progress display of long commands."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column


class Progress:
    """Shows the current stage, and its progress if known, on stderr if that is a terminal.

    Args:
        quiet: show nothing.
        time_left: show the estimated time that is left.
    """

    def __init__(self, quiet: bool = False, *, time_left: bool = False) -> None:
        console = Console(stderr=True)
        self._shown = console.is_terminal and not quiet
        stage = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = SpinnerColumn(), TextColumn("{task.description}", table_column=stage)
        ends = [BarColumn(bar_width=16), TimeElapsedColumn()]
        ends += [TextColumn("left"), TimeRemainingColumn()] if time_left else []
        self._bar = Bar(*columns, *ends, console=console, transient=True, expand=True)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> "Progress":
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._bar.stop()

    def show(self, stage: str, share: float | None = None) -> None:
        """Shows a stage and the share of all work that is done, from 0 to 1, if known."""
        total = None if share is None else 1.0
        self._bar.update(self._task, description=stage, total=total, completed=share or 0.0)
