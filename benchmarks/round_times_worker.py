"""What ``benchmarks.round_times`` runs in each checkout: generations, timed.

This file runs as a program with the package of another checkout, which may be older, so it imports
nothing but ``outrider``, and ``inflate.py`` from the folder that it is in.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.runtime.executors.compiled import Compile

PROMPT = 'def fibonacci(n):\n    """Return the n-th number."""\n'
METHODS = ("plain", "speculative", "prompt-lookup")
TEMPERATURES = (0.0, 0.8)
NUM_TOKENS = 96
NUM_INFLATED_TOKENS = 16
_INFLATED = 2048, 18, 8, 7168
"""Hidden width, layers, key-value heads and MLP width of 0.9 billion parameters."""


def work(
    methods: Sequence[str], compile: Compile, dtype: str, threads: int, *, inflated: bool = False
) -> None:
    """Generates what the lines of standard input name; prints the time per round of each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    cases: dict[str, tuple[Any, Any, Any]] = {}
    num_tokens = NUM_INFLATED_TOKENS if inflated else NUM_TOKENS
    target: Any = inflated_target(dtype) if inflated else "embedded"
    for method in methods:
        draft = "embedded" if outrider.METHODS[method].needs_draft else None
        engine = outrider.load(target, draft, method, "fixed", compile=compile, dtype=dtype)
        for t in TEMPERATURES:
            sampling = outrider.Sampling(
                temperature=t, max_new_tokens=num_tokens, seed=1, ignore_eos=True
            )
            cases[f"{method}, temperature {t:g}"] = engine, PROMPT, sampling
        prompts = [PROMPT * (1 + i % 3) for i in range(8)]
        cases[f"{method}, temperature 0.8, batch of 8"] = engine, prompts, sampling
    for engine, prompt, sampling in cases.values():
        engine.generate(prompt, sampling)
    clock = time.thread_time if threads == 1 else time.perf_counter
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        engine, prompt, sampling = cases[line.strip()]
        began = clock()
        found = engine.generate(prompt, sampling)
        seconds = clock() - began
        many = isinstance(prompt, list)
        rounds = max(each.stats.rounds for each in found) if many else found.stats.rounds
        print(1e6 * seconds / rounds, flush=True)


def inflated_target(dtype: str) -> Any:
    """The embedded target at the cost of 0.9 billion parameters (``inflate.py``)."""
    spec = spec_from_file_location("inflate", Path(__file__).with_name("inflate.py"))
    assert spec is not None
    assert spec.loader is not None
    inflate = module_from_spec(spec)
    sys.modules["inflate"] = inflate
    spec.loader.exec_module(inflate)
    small = outrider.load(method="plain", dtype=dtype).target
    module = inflate.inflate(small.module, inflate.Shape(*_INFLATED))
    return type(small)(module, small.tokenizer, "inflated target")


def main() -> None:
    """Parses the options and works."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--compile", choices=["off", "auto"], required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--inflated", action="store_true")
    options = parser.parse_args()
    work(
        options.methods,
        options.compile,
        options.dtype,
        options.threads,
        inflated=options.inflated,
    )


if __name__ == "__main__":
    main()
