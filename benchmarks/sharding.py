"""Rounds of a target that is split among processes of one machine, beside the model of them.

    python -m benchmarks.sharding [--processes 2 4]

Runs ``outrider sharding`` under torchrun for each number of processes, on two Llamas with random
weights and 4 key-value heads, since those of the embedded target cannot be divided by 4. Processes
of one machine share its cores, so more of them are not faster here: the table shows how far the
model is off, and what an exchange costs. Run it on an idle machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import page
from outrider import assets
from outrider.lab.metadata import command_line


def save_models(folder: Path) -> list[str]:
    """Saves a target and a draft model; returns the options that name them."""
    tokenizer = AutoTokenizer.from_pretrained(assets.target_path())
    options = []
    for role, layers in (("target", 8), ("draft", 1)):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        LlamaForCausalLM(config).save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        options += [f"--{role}", str(folder / role)]
    return options


def measure(processes: int, options: Sequence[str]) -> dict[str, Any]:
    """What ``outrider sharding`` measures among so many processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    threads = max(1, torch.get_num_threads() // processes)
    done = subprocess.run(
        [*run, "-m", "outrider", "sharding", "--json", *options],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    heads = ("processes", "time of", "measured, ms", "model, ms", "measured / model")
    rows = []
    for found in report["found"]:
        times = {"forward pass of the target": found["target"]}
        times |= {f"round, draft {name}": each for name, each in found["rounds"].items()}
        for name, each in times.items():
            measured, predicted = each["measured"], each["predicted"]
            ratio = f"{measured / predicted:.2f}"
            rows.append(
                (found["size"], name, f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}", ratio)
            )
    lines = page.header("Rounds of a sharded target, and the model of them", report["about"])
    lines += page.table(heads, rows, left=2)
    lines += page.table(
        ("processes", "γ", "local work, ms", "all-reduces", "each, µs", "draft step, ms"),
        (
            (
                found["size"],
                found["num_speculative_tokens"],
                f"{1e3 * found['target']['local']:.1f}",
                found["target"]["num_exchanges"],
                f"{1e6 * found['all_reduce']['latency']:.0f}",
                f"{1e3 * found['draft_step']:.2f}",
            )
            for found in report["found"]
        ),
        left=0,
    )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--processes", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", default="64")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        settings = [*save_models(Path(folder)), "--dtype", options.dtype]
        settings += ["--max-new-tokens", options.max_new_tokens]
        found = [measure(processes, settings) for processes in options.processes]
    report = {"about": page.about(command_line()), "found": found}
    page.publish(options.out, "sharding", report, markdown(report))


if __name__ == "__main__":
    main()
