"""Tables in Markdown, as reports, recipes and benchmarks write them."""

from collections.abc import Iterable, Sequence


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1
) -> list[str]:
    """The lines of a table; a pipe or a line break in a cell does not end it.

    Args:
        heads: names of the columns.
        rows: cells, which are written by ``str``.
        left: number of columns that are aligned to the left; the others are to the right.
    """
    aligned = ["---" if column < left else "---:" for column in range(len(heads))]
    return [_row(heads), f"|{'|'.join(aligned)}|", *map(_row, rows)]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
