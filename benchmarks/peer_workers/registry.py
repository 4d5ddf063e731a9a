"""The peers, their rows, and their Python interpreters.

A peer's environment is ``DIR/<name>`` unless the command line names another interpreter. Outrider
and transformers share the interpreter of the benchmark.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_workers.client import Client
from benchmarks.peer_workers.protocol import BLOCKS, HEAD_KINDS, INT8, KINDS, OURS_IN_BLOCKS


@dataclass(frozen=True)
class Entry:
    """A peer.

    Attributes:
        name: in the table and on the command line.
        module: the worker.
        rows: that it can run, plain first.
        own_environment: whether it needs its own interpreter.
    """

    name: str
    module: str
    rows: tuple[str, ...]
    own_environment: bool = True


def _in_kinds(*rows: str) -> list[str]:
    """The rows with the name of each precision appended."""
    return [f"{row} {kind}" for kind in KINDS.values() for row in rows]


_METHODS = ("plain", "speculative")
_HEAD_METHODS = ("eagle3", "eagle3-hybrid", "eagle3-tree-hybrid", "auto")
_WORKERS = "benchmarks.peer_workers"
PEERS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "outrider",
            f"{_WORKERS}.outrider_worker",
            (
                "plain",
                "speculative",
                "prompt-lookup",
                "plain compiled",
                "speculative compiled",
                "prompt-lookup compiled",
                *(f"{method} compiled" for method in _HEAD_METHODS),
                *(
                    f"{method} {kind} compiled"
                    for kind in OURS_IN_BLOCKS
                    for method in (*_METHODS, "prompt-lookup", *_HEAD_METHODS)
                ),
                *(
                    f"{method} {kind} {of_head} compiled"
                    for kind in OURS_IN_BLOCKS
                    for of_head in HEAD_KINDS
                    for method in _HEAD_METHODS
                ),
            ),
            own_environment=False,
        ),
        Entry(
            "transformers",
            f"{_WORKERS}.transformers_worker",
            (
                "plain",
                "assisted",
                "prompt-lookup",
                "plain compiled",
                "assisted compiled",
                "prompt-lookup compiled",
            ),
            own_environment=False,
        ),
        Entry(
            "llama.cpp",
            f"{_WORKERS}.llama_cpp_worker",
            (
                *_METHODS,
                *_in_kinds(*_METHODS),
                *(f"{method} {kind}" for kind in BLOCKS for method in _METHODS),
            ),
        ),
        Entry(
            "openvino",
            f"{_WORKERS}.openvino_worker",
            (
                *_METHODS,
                "prompt-lookup",
                *_in_kinds(*_METHODS),
                *(f"{method} {INT8}" for method in (*_METHODS, "prompt-lookup")),
            ),
        ),
        Entry("vllm", f"{_WORKERS}.vllm_worker", ("plain", "speculative")),
    )
}


@dataclass(frozen=True)
class Environments:
    """The interpreters of the peers.

    Attributes:
        folder: contains one environment per peer, with the peer's name.
        named: interpreters by peer, which take precedence.
    """

    folder: Path
    named: Mapping[str, str]

    def command(self, entry: Entry) -> list[str]:
        """The command that starts the worker.

        Raises:
            FileNotFoundError: the interpreter does not exist.
        """
        if not entry.own_environment:
            return [sys.executable, "-m", entry.module]
        python = Path(self.named.get(entry.name, self.folder / entry.name / "bin" / "python"))
        if not python.exists():
            raise FileNotFoundError(f"no interpreter at {python}")
        return [str(python), "-m", entry.module]

    def start(self, entry: Entry, log: Path) -> Client:
        """Starts the peer's worker; raises FileNotFoundError like :meth:`command`."""
        return Client(self.command(entry), log)


def parse_rows(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Parses ``peer:row``; ``peer`` alone means all its rows.

    Raises:
        ValueError: the peer or the row does not exist.
    """
    found: list[tuple[str, str]] = []
    for text in texts:
        name, _, row = text.partition(":")
        if name not in PEERS:
            raise ValueError(f"{name!r}: the peers are {', '.join(PEERS)}")
        rows = PEERS[name].rows
        if row and row not in rows:
            raise ValueError(f"{row!r}: {name} has {', '.join(rows)}")
        found += [(name, one) for one in ([row] if row else rows)]
    return found


def float_rows() -> tuple[str, ...]:
    """All rows of all peers whose weights have 16 bits or more, and which need no head, as
    ``peer:row``."""
    return tuple(
        f"{name}:{row}"
        for name, entry in PEERS.items()
        for row in entry.rows
        if not {*OURS_IN_BLOCKS, INT8, *_HEAD_METHODS} & set(row.split())
    )


def once(rows: Sequence[tuple[str, str]], dtype: str) -> list[tuple[str, str]]:
    """The rows without those that name the run's precision, in which unnamed rows run already."""
    return [(peer, row) for peer, row in rows if not row.endswith(f" {KINDS[dtype]}")]
