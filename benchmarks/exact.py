"""Is speculative text plain decoding's, token for token? Eager, compiled, exact; in batches.

    python -m benchmarks.exact [--dtype bfloat16] [--prompts 100] [--tokens 256] [--inflate 180M]

A pass over six tokens rounds differently from a pass over one, so where two tokens are as probable
as each other, greedy text may part from plain decoding's, and most of what follows with it. With
``exact=True`` it may not. Prompts are pieces of files of Python's standard library; the
reference is plain decoding of the same runtime, one prompt at a time. Writes JSON and Markdown.
"""

import argparse
import json
import platform
import shlex
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

import outrider
from benchmarks.copy_prompts import prompts as prompts_of
from outrider import Engine, Sampling
from outrider.methods import METHODS
from outrider.models import HFModel, load_model
from outrider.models.runtime import warm_up
from outrider.testing.inflate import Shape, inflate

SHAPES = {"180M": Shape(1024, 16, 4, 2560), "1B": Shape(2048, 18, 8, 7168)}
RUNTIMES = {
    "eager": {"compile": "off", "exact": False},
    "eager, exact": {"compile": "off", "exact": True},
    "compiled": {"compile": "auto", "exact": False},
    "compiled, exact": {"compile": "auto", "exact": True},
}


@dataclass
class Line:
    """One runtime and batch size held against plain decoding, one prompt at a time.

    Attributes:
        equal: prompts whose whole text is the same.
        first: the earliest place where a text parts, if one does.
        plain, tokens_per_second: of plain decoding alone, and of this.
    """

    runtime: str
    batch: int
    prompts: int
    equal: int
    first: int | None
    plain: float
    tokens_per_second: float


def engines(
    runtime: str, dtype: str, shape: Shape | None, batch: int, γ: int
) -> tuple[Engine, Engine]:
    """Plain, alone; and speculative in batches."""
    target: str | HFModel = "embedded"
    if shape is not None:
        small = load_model(outrider.assets.target_path(), dtype=dtype)
        target = HFModel(inflate(small.module, shape), small.tokenizer, "inflated target")
    settings = RUNTIMES[runtime]
    engine = outrider.load(
        target,
        "embedded",
        num_speculative_tokens=γ,
        max_batch_size=batch,
        dtype=dtype,
        compile=settings["compile"],  # type: ignore[arg-type]
        exact=bool(settings["exact"]),
    )
    if batch > 1:
        for model in (engine.target, *engine.drafter.models):  # type: ignore[attr-defined]
            warm_up(model, 2)
    return Engine(engine.target, None, METHODS["plain"], max_batch_size=1), engine


def timed(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[tuple[int, ...]], float]:
    """Texts and tokens per second."""
    began = time.perf_counter()
    results = engine.generate([list(prompt) for prompt in prompts], sampling)
    seconds = time.perf_counter() - began
    texts = [result.token_ids for result in results]
    return texts, sum(map(len, texts)) / seconds


def measure(
    names: Sequence[str],
    batches: Sequence[int],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    dtype: str,
    shape: Shape | None,
    γ: int,
) -> Iterator[Line]:
    """A line per runtime and batch size, as they come."""
    for name in names:
        wanted: list[tuple[int, ...]] = []
        speed = 0.0
        for batch in batches:
            plain, engine = engines(name, dtype, shape, batch, γ)
            if not wanted:
                wanted, speed = timed(plain, prompts, sampling)
            texts, faster = timed(engine, prompts, sampling)
            parted = [
                next(i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b)
                for x, y in zip(wanted, texts, strict=True)
                if x != y
            ]
            equal = len(prompts) - len(parted)
            first = min(parted, default=None)
            yield Line(name, batch, len(prompts), equal, first, speed, faster)


def table(lines: Sequence[Line], head: str) -> str:
    """Markdown."""
    rows = [
        f"| {x.runtime} | {x.batch} | {x.equal} of {x.prompts} | "
        f"{'' if x.first is None else x.first} | {x.plain:.0f} | {x.tokens_per_second:.0f} |"
        for x in lines
    ]
    columns = "| runtime | batch | same text | first difference | plain tokens/s | tokens/s |"
    return "\n".join(
        [
            "# Speculative text against plain decoding's, token for token",
            "",
            head,
            "",
            columns,
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--inflate", choices=SHAPES, default=None)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="exact", help="of the files of results")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    tokenizer = load_model(outrider.assets.target_path()).tokenizer
    assert tokenizer is not None
    texts = [prompt.text for prompt in prompts_of("code", args.prompts)]
    prompts = [tokenizer(text)["input_ids"][:24] for text in texts]
    sampling = Sampling(temperature=0, max_new_tokens=args.tokens, ignore_eos=True)
    lines = []
    shape = SHAPES[args.inflate] if args.inflate else None
    for line in measure(
        args.runtimes, args.batches, prompts, sampling, args.dtype, shape, args.gamma
    ):
        lines.append(line)
        print(line, flush=True)
    target = f"the embedded target inflated to {args.inflate}" if shape else "the embedded target"
    runtimes = "" if args.runtimes == list(RUNTIMES) else " --runtimes " + shlex.join(args.runtimes)
    command = (
        f"python -m benchmarks.exact --dtype {args.dtype} --prompts {args.prompts} "
        f"--tokens {args.tokens}{f' --inflate {args.inflate}' if shape else ''}{runtimes}"
    )
    head = (
        f"{date.today()}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.dtype}; {target}, "
        f"embedded draft, γ = {args.gamma}, temperature 0, {len(prompts)} prompts of 24 tokens, "
        f"{args.tokens} tokens each.\n\nCommand: `{command}`"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    document = {"arguments": vars(args) | {"out": ""}, "lines": [asdict(line) for line in lines]}
    (args.out / f"{args.name}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    (args.out / f"{args.name}.md").write_text(table(lines, head))


if __name__ == "__main__":
    main()
