"""The governor on recorded outputs, by the measured times of rounds instead of the clock.

    python -m benchmarks.governor_replay [--compile auto] [--seeds 8] [--drafts good poor]

At temperature 0 an output does not depend on what is drafted. So the target generates each output
once, the draft model says at which of its tokens it is right, and any choice of draft lengths can
be replayed: how many tokens each round commits is known, and how long it takes was measured when
the engine was first loaded, and kept in the cache folder. A replay of an output takes milliseconds,
runs no model, and does not depend on what else the machine does, so that it shows effects of a
change that a clock cannot.

Texts and drafts are those of ``benchmarks.governor``. Each seed is a governor of its own, which
keeps what it has learned from one cell to the next. It sees times with noise, and begins with times
that are wrong by as much as those of another day; what counts is how long the rounds take on
average. In each cell plain decoding, each fixed length and the governor generate the same outputs;
the governor's ratio is the mean over the seeds, and over the turns but the first. The draft model's
reading of the prompts counts for all that draft.

Last, texts and batch sizes come in random order, and each batch has its own best fixed length.
"""

import argparse
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import outrider
from benchmarks import page
from benchmarks.governor import OVER_BEST, OVER_PLAIN, TEXTS, noisy_draft
from benchmarks.governor_cases import NOISE, prompts_of
from outrider import METHODS, Engine, Sampling, assets
from outrider.core import REVIEW_WIDTH
from outrider.engine.governor.batch_governor import BatchGovernor, LengthChooser
from outrider.engine.governor.costs import RoundCosts
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.reviews import MOST_REVIEWED
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.saved_times import ReviewTime, RoundTime
from outrider.engine.governor.sources import Sources
from outrider.lab.metadata import command_line

GREEDY = True
_MIXED_BATCHES = 30  # of each seed, with texts in random order
_FIRST_MIXED = 4  # of which so many teach the governor only


class Output(NamedTuple):
    """A greedy output.

    Attributes:
        prompt, tokens: token ids.
        right: by token, whether the draft model's most probable token is the same.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    right: tuple[bool, ...]


def outputs_of(engine: Engine, prompts: Sequence[Any], num_tokens: int) -> list[Output]:
    """What the engine's target generates, and where its draft model is right."""
    plain = engine.with_method(METHODS["plain"])
    sampling = Sampling(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
    found = []
    for prompt, result in zip(prompts, plain.generate(prompts, sampling), strict=True):
        ids, tokens = tuple(engine.encode(prompt)), tuple(result.token_ids)
        found.append(Output(ids, tokens, right_tokens(engine, ids, tokens)))
    return found


def right_tokens(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[bool, ...]:
    """By token of an output, whether the draft model gives it the highest probability."""
    assert engine.draft is not None
    with torch.inference_mode():
        logits_1NV = engine.draft.module(torch.tensor([[*prompt, *tokens]])).logits
    best = logits_1NV[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return tuple(a == b for a, b in zip(best, tokens, strict=True))


class Machine:
    """How long rounds take.

    Args:
        costs: measured times; they do not change.
        rows: the largest batch.
        lengths: draft lengths, ascending from 0.

    Attributes:
        lengths: all draft lengths from 0 to the longest.
    """

    def __init__(self, costs: RoundCosts, rows: int, lengths: tuple[int, ...]) -> None:
        self.lengths = tuple(range(lengths[-1] + 1))
        self._rounds = {size: costs.curve(size, self.lengths) for size in range(1, rows + 1)}
        self._shares = {
            (size, length): draft / total for size, length, draft, total in costs.cells() if length
        }
        self._costs = costs

    def reading(self, rows: int, num_tokens: int) -> float:
        """Seconds in which the draft model reads so many committed tokens of each row."""
        return self._costs.catch_up(rows, num_tokens)

    def round(self, rows: int, length: int) -> float:
        """Seconds of a round whose draft model lacks nothing."""
        return self._rounds[rows][length]

    def drafting(self, rows: int, length: int) -> float:
        """The part of them in the draft model, by the nearest batch size and length measured."""
        if not length:
            return 0.0
        near = min(self._shares, key=lambda cell: (abs(cell[1] - length), abs(cell[0] - rows)))
        return self._shares[near] * self.round(rows, length)

    def times(self, sizes: Iterable[int], error: float, drawn: random.Random) -> list[RoundTime]:
        """Times as of another day: wrong by a relative standard deviation, which is the same for
        the draft and the rest of a round."""
        found = []
        for size, length in itertools.product(sizes, self.lengths):
            wrong = _near_one(drawn, error)
            draft, total = self.drafting(size, length), self.round(size, length)
            found.append(RoundTime(GREEDY, size, length, wrong * draft, wrong * total))
        return found


def _near_one(drawn: random.Random, deviation: float) -> float:
    return max(0.5, drawn.gauss(1, deviation))


class Fixed:
    """Drafts the same length in each round.

    Args:
        length: the draft length.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        length = min(self._length, max(limits))
        return Asked(0, length, [min(length, limit) for limit in limits])

    def reads_prompts(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, num_tokens: int
    ) -> bool:
        return self._length > 0

    def learn(self, *_: Any, **__: Any) -> None:
        """Nothing is learned."""


@dataclass
class _Row:
    """A row of a batch that is replayed."""

    output: Output
    tokens: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.output.tokens) - len(self.tokens)

    def accepts(self, length: int) -> int:
        """How many tokens of a draft are accepted."""
        right = self.output.right[len(self.tokens) :][:length]
        return next((k for k, is_right in enumerate(right) if not is_right), len(right))

    def commit(self, num_accepted: int) -> None:
        first = len(self.tokens)
        self.tokens += self.output.tokens[first : first + num_accepted + 1]

    def labels(self, num_tokens: int) -> list[float]:
        """Whether the draft model was right at the newest tokens."""
        ends = len(self.tokens)
        return [float(is_right) for is_right in self.output.right[ends - num_tokens : ends]]


def replay(
    chooser: LengthChooser,
    outputs: Sequence[Output],
    machine: Machine,
    noise: float = 0.0,
    drawn: random.Random | None = None,
) -> float:
    """Runs the rounds of a batch until all rows have ended.

    Args:
        chooser: of draft lengths.
        outputs: of its rows.
        machine: how long rounds take.
        noise: relative standard deviation of the times that the chooser sees.
        drawn: where the noise comes from.

    Returns:
        The seconds of all rounds, without noise.
    """
    drawn = drawn or random.Random(0)
    rows = [_Row(output) for output in outputs]
    memories = [RowMemory(GREEDY, row.output.prompt, row.tokens) for row in rows]
    longest = max(len(row.output.prompt) for row in rows)
    seconds, undrafted = 0.0, 0
    if chooser.reads_prompts(memories, _limits(rows, machine), GREEDY, longest):
        seconds += machine.reading(len(rows), longest)
    else:
        for row, memory in zip(rows, memories, strict=True):
            memory.of(0).undrafted = len(row.output.prompt) - 1
    while rows:
        num, reviewable = len(rows), min(undrafted, MOST_REVIEWED)
        asked = chooser.ask(memories, _limits(rows, machine), GREEDY, reviewable)
        accepted = [row.accepts(n) for row, n in zip(rows, asked.lengths, strict=True)]
        reviewed = [row.labels(reviewable) for row in rows] if asked.reviews else []
        draft = machine.drafting(num, asked.length)
        rest = machine.round(num, asked.length) - draft
        if asked.reviews or asked.length:
            draft += machine.reading(num, asked.num_read)
        seconds += draft + rest
        for row, k in zip(rows, accepted, strict=True):
            row.commit(k)
        undrafted = 0 if asked.length else 1 if asked.reviews else undrafted + 1
        shown = [k if row.left else None for row, k in zip(rows, accepted, strict=True)]
        slow = _near_one(drawn, noise)
        draft, total = slow * draft, slow * (draft + rest)
        chooser.learn(asked, memories, shown, GREEDY, draft, total, reviewed=reviewed)
        if None in shown:
            memories = [each for each, row in zip(memories, rows, strict=True) if row.left]
            rows, undrafted = [row for row in rows if row.left], 0
    return seconds


def _limits(rows: Sequence[_Row], machine: Machine) -> list[int]:
    return [min(machine.lengths[-1], row.left - 1) for row in rows]


@dataclass
class Subject:
    """A draft whose outputs are replayed.

    Attributes:
        machine: how long rounds with it take.
        sources: what the governor may choose from.
        outputs: by text and batch size.
        fixed: draft lengths that the governor is compared with, 0 among them.
    """

    machine: Machine
    sources: Sources
    outputs: dict[tuple[str, int], list[Output]]
    fixed: Sequence[int]

    def governor(self, error: float, drawn: random.Random) -> Governor:
        """A new governor, which has measured times with an error."""
        sizes = sorted({size for _, size in self.outputs})
        reviews = [
            ReviewTime(GREEDY, size, self.machine.reading(size, REVIEW_WIDTH)) for size in sizes
        ]
        made = Governor(self.sources)
        made.assume(self.machine.times(sizes, error, drawn), reviews)
        return made

    def speeds(self, outputs: Sequence[Output]) -> dict[int, float]:
        """Batches of these outputs per second, by fixed length."""
        return {n: 1 / replay(Fixed(n), outputs, self.machine) for n in self.fixed}


class Share(NamedTuple):
    """A mean over seeds, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Share":
        spread = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return cls(mean(values), spread)


def replay_cells(subject: Subject, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The governor's share of plain decoding's speed and of the best fixed length's, by cell."""
    found: dict[tuple[str, int], list[float]] = {cell: [] for cell in subject.outputs}
    for seed in range(options.seeds):
        drawn = random.Random(seed)
        governor = subject.governor(options.error, drawn)
        for cell, outputs in subject.outputs.items():
            turns = [
                1 / replay(BatchGovernor(governor), outputs, subject.machine, options.noise, drawn)
                for _ in range(options.turns)
            ]
            found[cell].append(mean(turns[1:]))
    cells = {}
    for (text, size), governed in found.items():
        fixed = subject.speeds(subject.outputs[text, size])
        best = max(fixed, key=lambda length: fixed[length])
        cells[f"{text}, {size}"] = {
            "best": best,
            "best_over_plain": fixed[best] / fixed[0],
            "over_plain": Share.of([each / fixed[0] for each in governed]),
            "over_best": Share.of([each / fixed[best] for each in governed]),
        }
    return cells


def replay_mixed(subject: Subject, options: argparse.Namespace) -> Share:
    """The share of the best fixed length of each batch, with texts and batch sizes in random
    order."""
    shares = []
    cells = list(subject.outputs)
    fastest = {cell: max(subject.speeds(subject.outputs[cell]).values()) for cell in cells}
    for seed in range(options.seeds):
        drawn = random.Random(1000 + seed)
        governor, ratios = subject.governor(options.error, drawn), []
        for cell in drawn.choices(cells, k=_MIXED_BATCHES):
            chooser = BatchGovernor(governor)
            outputs = subject.outputs[cell]
            seconds = replay(chooser, outputs, subject.machine, options.noise, drawn)
            ratios.append(1 / seconds / fastest[cell])
        shares.append(mean(ratios[_FIRST_MIXED:]))
    return Share.of(shares)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    rows = [
        (draft, *key.split(", "), cell)
        for draft, found in report["drafts"].items()
        for key, cell in found["cells"].items()
    ]
    plain = [cell["over_plain"][0] for *_, cell in rows]
    best = [cell["over_best"][0] for *_, cell in rows if cell["best"]]
    lines = page.header(
        "The governor on recorded outputs",
        about,
        f"greedy outputs of {about['tokens']} tokens, {about['seeds']} seeds; means and their "
        f"standard errors. Rounds take the times measured on this machine.",
    )
    lines += ["", f"- Over plain decoding: {_verdict(plain, OVER_PLAIN)}."]
    lines += [f"- Over the best fixed length, where drafts pay: {_verdict(best, OVER_BEST)}."]
    lines += [
        f"- Texts and batch sizes in random order, {draft} draft: {_shown(found['mixed'])} of the "
        f"best fixed length of each batch."
        for draft, found in report["drafts"].items()
    ]
    lines += page.table(
        (
            "draft",
            "text",
            "batch",
            "governor over plain",
            "best length",
            "best over plain",
            "governor over best",
        ),
        (
            (
                *(draft, text, size, _shown(cell["over_plain"]), cell["best"]),
                f"{cell['best_over_plain']:.3f}",
                _shown(cell["over_best"]) if cell["best"] else "-",
            )
            for draft, text, size, cell in rows
        ),
        left=2,
    )
    return "\n".join(lines) + "\n"


def _verdict(shares: Sequence[float], bar: float) -> str:
    if not shares:
        return "no cell"
    met = sum(share >= bar for share in shares)
    return (
        f"{met} of {len(shares)} cells at {bar} or more, the lowest {min(shares):.3f}, "
        f"mean {mean(shares):.3f}"
    )


def _shown(share: Sequence[float]) -> str:
    return f"{share[0]:.3f} ± {share[1]:.3f}"


def subject_of(options: argparse.Namespace, draft: str) -> Subject:
    """Loads a pair, measures its rounds, and generates the outputs.

    Raises:
        SystemExit: the draft is a head, or the times of rounds could not be measured.
    """
    source = options.draft or assets.draft_path()
    with TemporaryDirectory() as folder:
        engine = outrider.load(
            options.target,
            noisy_draft(source, NOISE[draft], options.dtype, Path(folder)),
            num_speculative_tokens="auto",
            compile=options.compile,
            dtype=options.dtype,
            max_batch_size=max(options.batches),
        )
    if engine.draft is None or engine.governor is None:
        raise SystemExit(f"{source} is not a draft model; only drafts of such models are replayed")
    costs = engine.governor.costs(GREEDY, 0)
    if costs.is_empty:
        raise SystemExit(
            "the times of rounds were not measured, since the machine was busy: start again when "
            "it is idle; they are then kept in the cache folder"
        )
    outputs = {
        (text, size): outputs_of(
            engine, prompts_of(text, size, engine.target.num_tokens), options.tokens
        )
        for text, size in itertools.product(options.texts, options.batches)
    }
    sources = engine.governor.sources
    machine = Machine(costs, max(options.batches), sources.lengths)
    fixed = [length for length in sources.lengths if length <= options.longest]
    return Subject(machine, sources, outputs, fixed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, replays, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=1)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--compile", choices=["off", "auto"], default="auto")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per row")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6, help="of each cell; the first is left out")
    parser.add_argument("--noise", type=float, default=0.06, help="of times that are measured")
    parser.add_argument("--error", type=float, default=0.12, help="of times that are assumed")
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=TEXTS)
    parser.add_argument("--drafts", choices=list(NOISE), nargs="+", default=["good", "poor"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--longest", type=int, default=5, help="fixed length to compare with")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("tokens", "seeds", "noise", "error")}
    report: dict[str, Any] = {"about": page.about(command_line(), **settings), "drafts": {}}
    for draft in options.drafts:
        subject = subject_of(options, draft)
        cells, mixed = replay_cells(subject, options), replay_mixed(subject, options)
        report["drafts"][draft] = {"cells": cells, "mixed": mixed}
        page.write(options.out, "governor_replay", report, markdown(report))
    page.publish(options.out, "governor_replay", report, markdown(report))


if __name__ == "__main__":
    main()
