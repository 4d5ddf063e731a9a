"""The lines of the input, in blocks that one worker answers at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import InvalidParameterError

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Consecutive lines.

    Attributes:
        number: from 0.
        first: the number of its first line in the file, from 1.
        lines: without their ends.
    """

    number: int
    first: int
    lines: tuple[bytes, ...]

    @property
    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Each line with its number in the file."""
        return enumerate(self.lines, self.first)


@dataclass(frozen=True)
class Input:
    """A file of lines, of which blocks are read when they are needed.

    Attributes:
        path: the file.
        block_lines: lines of a block; the last one may have fewer.
        num_lines: all lines. Only a line feed ends a line, and the last line needs none.
        sha256: of the file.
        begins: the position in the file at which each block begins, in bytes.
    """

    path: Path
    block_lines: int
    num_lines: int
    sha256: str
    begins: tuple[int, ...]

    @classmethod
    def scan(cls, path: Path, block_lines: int) -> Input:
        """Reads a file once, to find its blocks.

        Raises:
            InvalidParameterError: a file that cannot be read, or read again, is compressed, or has
                no lines.
        """
        if block_lines < 1:
            raise InvalidParameterError(f"block_lines={block_lines}: must be at least 1")
        digest, begins, position, num_lines = hashlib.sha256(), [], 0, 0
        try:
            with open(path, "rb") as file:
                if not file.seekable():
                    raise InvalidParameterError(
                        f"'{path}' is a pipe, and prompts are read again when their turn comes: "
                        f"write them to a file"
                    )
                for line in file:
                    if num_lines == 0 and line.startswith(_GZIP):
                        raise InvalidParameterError(
                            f"'{path}' is compressed: decompress it first, as by gunzip"
                        )
                    if num_lines % block_lines == 0:
                        begins.append(position)
                    digest.update(line)
                    position += len(line)
                    num_lines += 1
        except OSError as error:
            raise InvalidParameterError(
                f"cannot read the prompts '{path}': {error.strerror or error}"
            ) from error
        if not num_lines:
            raise InvalidParameterError(f"'{path}' is empty: write one prompt per line")
        return cls(path, block_lines, num_lines, digest.hexdigest(), tuple(begins))

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.begins)

    def size(self, number: int) -> int:
        """The number of lines of a block."""
        return min(self.block_lines, self.num_lines - number * self.block_lines)

    def read(self, number: int) -> Block:
        """A block by its number."""
        with open(self.path, "rb") as file:
            file.seek(self.begins[number])
            lines = [file.readline() for _ in range(self.size(number))]
        if number == 0:
            lines[0] = lines[0].removeprefix(_BOM)
        ends = tuple(line.rstrip(b"\n").rstrip(b"\r") for line in lines)
        return Block(number, 1 + number * self.block_lines, ends)
