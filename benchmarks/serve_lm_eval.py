"""lm-eval's ``local-completions`` against a server, beside the same task through transformers.

    python -m benchmarks.serve_lm_eval

The task is multiple choice over lines of Python, made here, so that nothing is downloaded. Both
score the embedded target in float32. All log-likelihoods must agree to 1e-3, and all greedy flags
must be the same. Needs the extras ``serve``, ``lmeval`` and ``data``. Writes
``benchmarks/results/serve_lm_eval.json``.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import about
from benchmarks.page import parser as page_parser
from benchmarks.peer_workers.pairs import embedded
from benchmarks.serve_process import serving

TOLERANCE = 1e-3
QUESTIONS = [
    ("for i in range(10):\n    print(", ["i)", "x y", "def"]),
    ("import numpy as", [" np", " pandas", " (("]),
    ("def add(a, b):\n    return a", [" + b", " import", ":"]),
    ("class A:\n    def __init__(", ["self", "return", "1.5"]),
    ("if x is not", [" None:", " lambda", " ]]"]),
    ("try:\n    f()\nexcept ", ["ValueError:", "for", "}}"]),
    ("with open(name) as", [" f:", " +", " while"]),
    ("x = [1, 2, 3]\ny = len(", ["x)", "import", "class"]),
]


def task(folder: Path) -> dict[str, Any]:
    """The task, with its questions in a file."""
    rows = [{"question": q, "choices": c, "answer": 0} for q, c in QUESTIONS]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": "python_lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def answers(config: dict[str, Any], kind: str, **arguments: Any) -> list[tuple[float, bool]]:
    """The log-likelihood of each choice of each question, and whether it is the greedy one."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=kind, model_args=arguments, tasks=[config], log_samples=True, bootstrap_iters=0,
        batch_size=1,
    )  # fmt: skip
    (samples,) = found["samples"].values()
    pairs = [pair for sample in samples for pair in sample["filtered_resps"]]
    return [(float(logprob), str(greedy) == "True") for logprob, greedy in pairs]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = page_parser(__doc__)
    options.add_argument("--exports", type=Path, default=Path("runs/benchmarks/peers"))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compares the two; the exit status."""
    given = parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(given.threads)
    target = embedded(given.exports).target
    with tempfile.TemporaryDirectory() as folder:
        config = task(Path(folder))
        own = answers(config, "hf", pretrained=str(target), dtype="float32", device="cpu")
        serve = [str(target), "--method", "suffix", "--dtype", "float32"]
        with serving(serve, Path(folder) / "serve.log", given.threads) as server:
            served = answers(
                config,
                "local-completions",
                model="target",
                base_url=f"{server.url}/v1/completions",
                tokenizer=str(target),
                tokenizer_backend="huggingface",
                num_concurrent=4,
            )
    worst = max(abs(a - b) for (a, _), (b, _) in zip(own, served, strict=True))
    same = [a for _, a in own] == [b for _, b in served]
    line = " ".join(["python -m benchmarks.serve_lm_eval", *(arguments or sys.argv[1:])])
    report = {
        "about": about(line, threads=given.threads, lm_eval=version("lm_eval")),
        "log_likelihoods": len(own),
        "largest_difference": worst,
        "greedy_flags_equal": same,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "serve_lm_eval.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(own)} log-likelihoods; largest difference {worst:.2e}; greedy flags equal: {same}")
    return 0 if worst <= TOLERANCE and same else 1


if __name__ == "__main__":
    sys.exit(main())
