"""SIGKILL at random moments of `outrider train-head`: runs resume, and end as if nothing had been.

Each run has hidden states of its own, so that their computation is interrupted, too.
"""

import random
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from fork_server import fork_server
from safetensors.torch import load_file
from test_parallel_heads_run import Files, files, run
from torch import Tensor

from outrider.train.checkpoint import CHECKPOINT

__all__ = ["files"]  # a fixture

KINDS = ("peagle", "medusa", "dspark")
KILLS = 20


def train(out: Path, target: Path, data: Path, kind: str) -> None:
    """A run in a process of its own."""
    torch.set_num_threads(1)
    run(out, Files(target, data), kind)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that have imported everything."""
    return fork_server("test_parallel_heads_run")


def contents(out: Path) -> tuple[dict[str, Tensor], str]:
    """Weights of the checkpoint and of both heads, and what was measured."""
    tensors = dict(torch.load(out / CHECKPOINT)["model"])
    for name in ("best", "last"):
        for file in (out / name).glob("*.safetensors"):
            tensors |= {f"{name}/{key}": tensor for key, tensor in load_file(file).items()}
    return tensors, (out / "best" / "measured.json").read_text()


def test_killed_at_random_moments(
    processes: ForkServerContext, files: Files, tmp_path: Path
) -> None:
    """Kills runs until 20 have been hit, each time going on after the last kill. Moments are drawn
    from the time that an uninterrupted run takes here."""
    chance, killed, number = random.Random(3), 0, 0
    wanted, seconds = {}, {}
    while killed < KILLS:
        kind = KINDS[number % len(KINDS)]
        if kind not in wanted:
            out, began = tmp_path / f"whole-{kind}" / "out", time.monotonic()
            process = processes.Process(target=train, args=(out, *files, kind))
            process.start()
            process.join()
            seconds[kind], wanted[kind] = time.monotonic() - began, contents(out)
        out, code = tmp_path / str(number) / "out", None
        number += 1
        while code != 0:
            process = processes.Process(target=train, args=(out, *files, kind))
            process.start()
            process.join(chance.uniform(0, seconds[kind]) if killed < KILLS else None)
            process.kill()
            process.join()
            code = process.exitcode
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
            if (out / CHECKPOINT).exists():
                torch.load(out / CHECKPOINT)  # is whole
        tensors, measured = contents(out)
        assert measured == wanted[kind][1]
        assert tensors.keys() == wanted[kind][0].keys()
        assert all(torch.equal(tensors[key], wanted[kind][0][key]) for key in tensors)
