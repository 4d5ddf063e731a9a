"""Kills ``outrider batch`` at random, and compares its output with that of an undisturbed run.

    python -m benchmarks.batch_kills

A toy pair with random weights answers 10⁵ short prompts by speculative sampling, some lines being
malformed: once undisturbed, and once with 20 kills by SIGKILL at random times. Most kill a worker;
some kill the whole command, with its workers or without them, which is then started again. The
outputs must be the same bytes, and have every line once, in order. Prints a JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MALFORMED_EVERY = 9973
WORDS = "the a of model draft token writes reads keeps large small target".split()


def write_models(folder: Path) -> None:
    """A target and a draft that often agrees with it, with a byte-level tokenizer."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({"<eos>": 0} | {s: i for i, s in enumerate(symbols, 1)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    for name, scale in (("target", 0.2), ("draft", 0.19)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            eos_token_id=0,
            initializer_range=scale,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_prompts(path: Path, num_lines: int) -> None:
    choose = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(1, num_lines + 1):
            text = " ".join(choose.choices(WORDS, k=choose.randint(1, 4)))
            line = json.dumps({"id": number, "prompt": text})
            file.write((line[:-3] if number % MALFORMED_EVERY == 0 else line) + "\n")


def command(given: argparse.Namespace, out: Path) -> list[str]:
    options = {
        "-o": out,
        "--target": given.folder / "target",
        "--draft": given.folder / "draft",
        "--dtype": "float32",
        "--device": "cpu",
        "--num-speculative-tokens": 2,
        "--max-new-tokens": 4,
        "--workers": given.workers,
        "--batch-size": 128,
        "--block-lines": given.block_lines,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "outrider", "batch", str(given.folder / "prompts.jsonl"), *words]


def workers_of(pid: int) -> list[int]:
    """The worker processes of a command."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(each) for each in children if b"spawn_main" in _command_line(int(each))]
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)


class Killer:
    """Runs a command to its end, killing it on the way.

    Args:
        arguments: the command.
        parts: the folder of its finished blocks.
        begins: how many of them there must be before each kill.
        whole: the numbers of the kills that hit the command itself.
        seed: of the choices.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        parts: Path,
        begins: Sequence[int],
        whole: set[int],
        seed: int,
    ) -> None:
        self.arguments, self.parts, self.begins, self.whole = arguments, parts, begins, whole
        self.choose = random.Random(seed)
        self.workers_killed = self.commands_killed = 0

    def run(self) -> int:
        """The exit code of the run that came to its end."""
        process = subprocess.Popen(self.arguments)
        for number, begin in enumerate(self.begins):
            while len(list(self.parts.glob("*.jsonl"))) < begin and process.poll() is None:
                time.sleep(0.02)
            time.sleep(self.choose.uniform(0, 0.3))
            while process.poll() is None and not workers_of(process.pid):
                time.sleep(0.02)
            if process.poll() is not None:
                break
            if number in self.whole:
                self._kill_command(process, with_workers=self.choose.random() < 0.5)
                process = subprocess.Popen(self.arguments)
            else:
                kill(self.choose.choice(workers_of(process.pid)))
                self.workers_killed += 1
        return process.wait()

    def _kill_command(self, process: subprocess.Popen[bytes], *, with_workers: bool) -> None:
        workers = workers_of(process.pid)
        kill(process.pid)
        process.wait()
        self.commands_killed += 1
        for worker in workers if with_workers else []:
            kill(worker)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Kill `outrider batch` at random.")
    parser.add_argument("--folder", type=Path, default=Path("runs/batch/kills"))
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--whole", type=int, default=4, help="kills of the whole command")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--block-lines", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    write_models(given.folder)
    write_prompts(given.folder / "prompts.jsonl", given.lines)
    undisturbed, killed = given.folder / "undisturbed.jsonl", given.folder / "killed.jsonl"
    for path in (undisturbed, killed):
        path.unlink(missing_ok=True)

    begin = time.monotonic()
    subprocess.run(command(given, undisturbed), check=False)
    middle = time.monotonic()
    choose = random.Random(given.seed)
    num_blocks = -(-given.lines // given.block_lines)
    begins = sorted(choose.choices(range(num_blocks * 19 // 20), k=given.kills))
    whole = set(choose.sample(range(given.kills), given.whole))
    parts = killed.with_name(killed.name + ".parts")
    killer = Killer(command(given, killed), parts, begins, whole, given.seed)
    code = killer.run()
    end = time.monotonic()

    lines = killed.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    numbers = [each["error"]["line"] if "error" in each else each["id"] for each in records]
    checks = {
        "every_line_once_in_order": numbers == list(range(1, given.lines + 1)),
        "equal_to_undisturbed": killed.read_bytes() == undisturbed.read_bytes(),
        "malformed_lines_reported": sum("error" in each for each in records)
        == given.lines // MALFORMED_EVERY,
    }
    report = {
        "lines": given.lines,
        "blocks": num_blocks,
        "workers": given.workers,
        "workers_killed": killer.workers_killed,
        "commands_killed": killer.commands_killed,
        "exit_code": code,
        "seconds_undisturbed": round(middle - begin, 1),
        "seconds_killed": round(end - middle, 1),
        **checks,
    }
    print(json.dumps(report, indent=1))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
