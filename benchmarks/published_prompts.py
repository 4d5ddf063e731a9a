"""Draws prompts of four tasks from published files, for ``plans/smollm2_head.toml``.

    python -m benchmarks.published_prompts --mt-bench question.jsonl --gsm8k test.jsonl \\
        --spec-bench question.jsonl --humaneval HumanEval.jsonl.gz --out runs/smollm2/prompts

First turns of MT-bench, questions of GSM8K, the summarisation task of Spec-Bench and functions of
HumanEval: as many of each as ``--number`` says, drawn with a fixed seed. Each becomes a user's
message in OUT/TASK.jsonl.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SEED = 0


def records(path: Path) -> Iterator[Any]:
    """The JSON lines of a file, which may be compressed."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def prompts(mt_bench: Path, gsm8k: Path, spec_bench: Path, humaneval: Path) -> dict[str, list[str]]:
    """All prompts by task."""
    summaries = (each for each in records(spec_bench) if each["category"] == "summarization")
    return {
        "mt_bench": [each["turns"][0] for each in records(mt_bench)],
        "gsm8k": [each["question"] for each in records(gsm8k)],
        "summarization": [each["turns"][0] for each in summaries],
        "humaneval": [each["prompt"] for each in records(humaneval)],
    }


def draw(found: dict[str, list[str]], number: int) -> dict[str, list[str]]:
    """Some prompts of each task."""
    choose = random.Random(SEED)
    return {task: choose.sample(texts, number) for task, texts in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw prompts of four tasks.")
    for name in ("mt-bench", "gsm8k", "spec-bench", "humaneval", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--number", type=int, default=20, help="prompts of each task")
    given = parser.parse_args(arguments)
    found = prompts(given.mt_bench, given.gsm8k, given.spec_bench, given.humaneval)
    given.out.mkdir(parents=True, exist_ok=True)
    for task, texts in draw(found, given.number).items():
        lines = [{"messages": [{"role": "user", "content": text}], "task": task} for text in texts]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (given.out / f"{task}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
