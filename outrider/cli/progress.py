"""What a long command is doing, while it does it."""

from rich.console import Console


class Progress:
    """Says on a terminal's stderr what is being done."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._status = console.status("starting")
        self._shown = console.is_terminal and not quiet

    def __enter__(self) -> "Progress":
        if self._shown:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._status.stop()

    def show(self, stage: str) -> None:
        if self._shown:
            self._status.update(stage)
