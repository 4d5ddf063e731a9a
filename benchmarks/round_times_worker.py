"""What ``benchmarks.round_times`` runs in each checkout: generations, timed.

This file runs as a program with the package of another checkout, which may be older, so it imports
nothing but ``outrider``.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import outrider

PROMPT = 'def fibonacci(n):\n    """Return the n-th number."""\n'
METHODS = ("plain", "speculative", "prompt-lookup")
TEMPERATURES = (0.0, 0.8)
NUM_TOKENS = 96


def work(methods: Sequence[str], compile: str, dtype: str, threads: int) -> None:
    """Generates what the lines of standard input name; prints the time per round of each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    cases: dict[str, tuple[Any, Any, Any]] = {}
    for method in methods:
        engine = outrider.load(method=method, compile=compile, dtype=dtype)
        for t in TEMPERATURES:
            sampling = outrider.Sampling(
                temperature=t, max_new_tokens=NUM_TOKENS, seed=1, ignore_eos=True
            )
            cases[f"{method}, temperature {t:g}"] = engine, PROMPT, sampling
        prompts = [PROMPT * (1 + i % 3) for i in range(8)]
        cases[f"{method}, temperature 0.8, batch of 8"] = engine, prompts, sampling
    for engine, prompt, sampling in cases.values():
        engine.generate(prompt, sampling)
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        engine, prompt, sampling = cases[line.strip()]
        began = time.perf_counter()
        found = engine.generate(prompt, sampling)
        seconds = time.perf_counter() - began
        many = isinstance(prompt, list)
        rounds = max(each.stats.rounds for each in found) if many else found.stats.rounds
        print(1e6 * seconds / rounds, flush=True)


def main() -> None:
    """Parses the options and works."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--compile", choices=["off", "auto"], required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    work(options.methods, options.compile, options.dtype, options.threads)


if __name__ == "__main__":
    main()
