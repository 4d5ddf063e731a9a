"""A batch whose workers are killed at random, and which is itself interrupted: the output is that
of an undisturbed run. A small version of ``python -m benchmarks.batch_kills``."""

import os
import random
import signal
from pathlib import Path

import pytest

from benchmarks.batch_kills import write_models, write_prompts
from outrider import Sampling
from outrider.cluster.batch import Asking, LoadedModels, in_processes, run_batch
from outrider.cluster.batch.blocks import Input

NUM_LINES, BLOCK_LINES, KILLS = 200, 10, 2


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path) -> None:
    write_models(tmp_path)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    write_prompts(prompts, NUM_LINES)
    with open(prompts, "ab") as file:
        file.write(b"{malformed\n")
    loaded = LoadedModels(
        {
            "target": str(tmp_path / "target"),
            "draft": str(tmp_path / "draft"),
            "dtype": "float32",
            "device": "cpu",
            "max_batch_size": 8,
        },
        Asking(Sampling(max_new_tokens=4)),
    )
    undisturbed = loaded(0)
    lines = Input.scan(prompts, BLOCK_LINES)
    expected = "".join(undisturbed(lines.read(number)).text for number in range(len(lines)))

    choose, pids, killed = random.Random(0), list[int](), 0

    def kill_one(done: int, total: int) -> None:
        nonlocal killed
        if done > 40 * (killed + 1) and killed < KILLS:
            os.kill(choose.choice(pids), signal.SIGKILL)
            killed += 1
        if done > 120 and killed == KILLS:
            killed += 1
            raise KeyboardInterrupt

    def answer(tasks):  # type: ignore[no-untyped-def]
        return in_processes(loaded, tasks, 2, lambda now: pids.__setitem__(slice(None), now))

    def run() -> None:
        run_batch(prompts, out, answer, loaded.contents, block_lines=BLOCK_LINES, report=kill_one)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not out.exists()
    run()
    assert killed == KILLS + 1
    assert out.read_text() == expected
    assert len(expected.splitlines()) == NUM_LINES + 1
