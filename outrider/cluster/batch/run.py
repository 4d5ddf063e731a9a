"""A whole file: every line is answered once, in order, whatever dies on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.batch.answer import Answers
from outrider.cluster.batch.blocks import Block, Input
from outrider.cluster.batch.parts import Parts
from outrider.core.errors import InvalidParameterError

BLOCK_LINES = 256
"""Lines of a block: what the death of a worker can cost, and what it answers between two writes."""

Map = Callable[[Iterable[tuple[int, Block]]], Iterator[tuple[int, Answers]]]
"""Answers blocks, each with its number, in any order."""

Report = Callable[[int, int], None]
"""Told how many lines are answered, and how many there are."""


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        num_lines: lines of the input, and of the output.
        num_resumed: lines that an earlier run had answered.
        num_tokens: tokens of the outputs of this run.
        num_errors: lines without an answer.
        errors: the numbers of the first of these lines, and why they have none.
    """

    num_lines: int
    num_resumed: int
    num_tokens: int
    num_errors: int
    errors: tuple[tuple[int, str], ...]


def run_batch(
    prompts: Path,
    out: Path,
    answer: Map,
    contents: Mapping[str, Any],
    *,
    block_lines: int = BLOCK_LINES,
    overwrite: bool = False,
    report: Report = lambda done, total: None,
) -> Summary:
    """Answers a file of prompts, going on after an interruption. The output has a line for each
    line of the input, in the same order; lines that are malformed, or that the engine refuses, have
    an error there, and the others are answered.

    Args:
        prompts: a line per prompt, see ``lines.py``.
        out: the output.
        answer: answers blocks, such as :func:`in_processes`.
        contents: what else the answers depend on, as JSON values; a run goes on only with the same.
        block_lines: lines of a block.
        overwrite: whether an existing output is replaced.
        report: called after each block.

    Raises:
        InvalidParameterError: no prompts, or an output that cannot be gone on with.
        OutriderError: the disk is full, or an error of the workers. Finished blocks are kept, and
            the same call goes on after them.
    """
    lines = Input.scan(prompts, block_lines)
    if out.exists() and out.samefile(prompts):
        raise InvalidParameterError(
            f"'{out}' is the file of the prompts, which answers would replace: name another output"
        )
    known = {"prompts": lines.sha256, "block_lines": block_lines}
    parts = Parts(out, known | dict(contents))
    with parts.opened(overwrite=overwrite):
        finished = parts.finished
        resumed = done = sum(lines.size(number) for number in finished)
        report(done, lines.num_lines)
        pending = [number for number in range(len(lines)) if number not in finished]
        num_tokens = 0
        if pending:
            blocks = ((number, lines.read(number)) for number in pending)
            for number, answers in answer(blocks):
                parts.add(number, answers)
                num_tokens += answers.num_tokens
                done += lines.size(number)
                report(done, lines.num_lines)
        num_errors, errors = parts.errors()
        parts.join(len(lines))
    return Summary(lines.num_lines, resumed, num_tokens, num_errors, tuple(errors))
