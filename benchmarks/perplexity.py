"""The perplexity of a pair's target in the precisions in which peers run it.

    python -m benchmarks.perplexity --pair smollm2 --texts FILE.jsonl

Files in blocks are those of ``benchmarks.peers``, as Outrider reads them; llama.cpp multiplies the
same weights by activations of 8 bits, which this does not see. OpenVINO computes its own. A
precision whose perplexity is within 1 % of the run's own counts as equal where engines are compared
(``peer_workers/compare.py``). ``FILE`` has chat prompts, of which the messages are the texts.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.page import about, header, parser, publish, table
from benchmarks.peer_workers.client import Client
from benchmarks.peer_workers.gguf_export import exported
from benchmarks.peer_workers.pairs import PAIRS
from benchmarks.peer_workers.protocol import BLOCKS, INT8, ROUNDED, Job, Likelihood
from outrider.runtime.hf.load import load_model, load_tokenizer

EQUAL = 0.01
"""Relative difference of perplexities up to which they count as equal."""


def command_line() -> argparse.ArgumentParser:
    """The options."""
    options = parser(__doc__, threads=1)
    options.add_argument("--pair", choices=sorted(PAIRS), default="smollm2")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options.add_argument("--texts", type=Path, required=True, help="JSON lines of chat prompts")
    options.add_argument("--tokens", type=int, default=512, help="longer texts are cut")
    options.add_argument("--peers", type=Path, default=Path("runs/peers"))
    return options


def main() -> None:
    """Computes all perplexities, writes the report and prints it."""
    options = command_line().parse_args()
    torch.set_num_threads(options.threads)
    exports = (options.peers / "exports").resolve()
    pair = PAIRS[options.pair](exports)
    tokenizer: Any = load_tokenizer(pair.target)
    lines = map(json.loads, options.texts.read_text(encoding="utf-8").splitlines())
    texts = [tokenizer.encode(each["messages"][-1]["content"])[: options.tokens] for each in lines]
    target = str(pair.target)
    job = Job(target, target, 1, options.threads, options.tokens, str(exports), options.dtype)
    found = {options.dtype: _ours(target, options.dtype, texts)}
    for kind in BLOCKS:
        file = str(exported(job, target, kind))
        for more in ("", ROUNDED):
            found[kind + more] = _ours(file, options.dtype, texts, "keep" + more)
    python = options.peers / "openvino" / "bin" / "python"
    if python.exists():
        command = [str(python), "-m", "benchmarks.peer_workers.openvino_scoring"]
        with Client(command, exports / "openvino_scoring.log") as client:
            for row in ("plain", f"plain {INT8}"):
                client.prepare(row, job)
                name = f"OpenVINO, {row.partition(' ')[2] or options.dtype}"
                found[name] = client.likelihood(texts).perplexity
    where = about(shlex.join(["python", "-m", "benchmarks.perplexity", *sys.argv[1:]]))
    report = {
        "about": where | {"pair": pair.name, "texts": len(texts), "tokens": sum(map(len, texts))},
        "perplexities": found,
    }
    publish(options.out, "perplexity", report, page(report))


def page(report: dict[str, Any]) -> str:
    """The report as a page; the first row is what others are compared with."""
    where, found = report["about"], report["perplexities"]
    first = next(iter(found.values()))
    rows = (
        (name, f"{value:.3f}", f"{value / first - 1:+.2%}", "yes" if equal(value, first) else "no")
        for name, value in found.items()
    )
    settings = f"{where['tokens']:,} tokens of {where['texts']} texts."
    heads = ("weights", "perplexity", "against the first", "within 1 %")
    lines = header(f"Perplexity of the {where['pair']} target", where, settings)
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def equal(value: float, first: float) -> bool:
    """Whether a perplexity counts as equal."""
    return abs(value / first - 1) <= EQUAL


@torch.inference_mode()
def _ours(source: str, dtype: str, texts: list[list[int]], keep: str | None = None) -> float:
    module: Any = load_model(source, dtype=dtype, device="cpu", quantized=keep).module
    nats = 0.0
    for text in texts:
        ids_N = torch.tensor(text)
        logits_NV = module(input_ids=ids_N[None]).logits[0, :-1].float()
        nats += nn.functional.cross_entropy(logits_NV, ids_N[1:], reduction="sum").item()
    return Likelihood(nats, sum(len(text) - 1 for text in texts)).perplexity


if __name__ == "__main__":
    main()
