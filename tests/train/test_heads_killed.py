"""SIGKILL at random moments of `outrider train-head`: runs resume, and end as if nothing had been.

Each run has hidden states of its own, so that their computation is interrupted, too.
"""

import multiprocessing
import random
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_parallel_heads_run import Files, files, run
from torch import Tensor

from outrider.train.checkpoint import CHECKPOINT

__all__ = ["files"]  # a fixture

KINDS = ("peagle", "medusa", "dspark")


def train(out: Path, target: Path, data: Path, kind: str) -> None:
    """A run in a process of its own."""
    torch.set_num_threads(1)
    run(out, Files(target, data), kind)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_parallel_heads_run"])
    return context


def contents(out: Path) -> tuple[dict[str, Tensor], str]:
    """Weights of the checkpoint and of both heads, and what was measured."""
    tensors = dict(torch.load(out / CHECKPOINT)["model"])
    for name in ("best", "last"):
        for file in (out / name).glob("*.safetensors"):
            tensors |= {f"{name}/{key}": tensor for key, tensor in load_file(file).items()}
    return tensors, (out / "best" / "measured.json").read_text()


def kill(context: ForkServerContext, files: Files, folder: Path, kills: int) -> None:
    """Kills runs until so many have been hit, each time going on after the last kill."""
    chance, killed, number = random.Random(3), 0, 0
    wanted = {}
    while killed < kills:
        kind = KINDS[number % len(KINDS)]
        if kind not in wanted:
            run(folder / f"whole-{kind}" / "out", files, kind)
            wanted[kind] = contents(folder / f"whole-{kind}" / "out")
        out, code = folder / str(number) / "out", None
        number += 1
        while code != 0:
            process = context.Process(target=train, args=(out, *files, kind))
            process.start()
            process.join(chance.uniform(0.05, 2.0) if killed < kills else None)
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


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(
    kills: int,
    processes: ForkServerContext,
    files: Files,
    tmp_path: Path,
) -> None:
    kill(processes, files, tmp_path, kills)
