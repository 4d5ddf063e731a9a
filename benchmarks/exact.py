"""Compares speculative outputs with plain decoding token for token, with and without ``exact``.

    python -m benchmarks.exact [--target embedded] [--compile off] [--batch 1 8] [--minutes 4]

A forward pass over six tokens rounds differently from a pass over one. Where two tokens are almost
equally probable, greedy output may therefore differ from plain decoding, and so may most of what
follows. With ``exact=True``, it must not. The reference is plain decoding of the same runtime, one
prompt at a time. Prompts are beginnings of the texts of ``benchmarks.copy_prompts``, of all kinds
in turn.

A part of the report is a target, a level of ``compile``, a precision and the processor's vector
width, which ``ATEN_CPU_CAPABILITY`` (default, avx2, avx512) can lower. It runs with and without
``exact`` alternately, or with ``--exact-only``. Targets:

    embedded   with the embedded draft
    inflated   the same function at the cost of 180 million parameters, ``benchmarks.inflate``
    odd        random weights, sizes that are no multiples of a vector width; its draft is the same
               with 2 % noise

The prompts are split into pieces. Finished pieces are kept, so a part can be measured in several
calls of about ``--minutes`` each. Writes JSON and Markdown.
"""

import argparse
import copy
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from benchmarks import page
from benchmarks.copy_prompts import Kind
from benchmarks.copy_prompts import prompts as prompts_of
from benchmarks.inflate import Shape, inflate
from outrider import Engine, Sampling
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model

Compile = Literal["off", "auto", "max"]
Row = dict[str, Any]
SHAPE = Shape(hidden_size=1024, num_layers=16, num_key_value_heads=4, intermediate_size=2560)
TARGETS = {
    "embedded": "embedded target",
    "inflated": "target inflated to 180 million parameters",
    "odd": "random target of odd sizes",
}
ODD: dict[str, Any] = {
    "hidden_size": 84,
    "intermediate_size": 212,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 1024,
}
NOISE = 0.02
LEVELS: dict[Compile, str] = {"off": "eager", "auto": "compiled", "max": "compiled, max"}
PROMPT_KINDS: tuple[Kind, ...] = (
    "code",
    "repeat",
    "free",
)  # an edit has the same beginning as a repeat
PROMPT_TOKENS = 24
COST_BAR = 0.10


def prompts(num: int) -> list[list[int]]:
    """At most ``num`` beginnings of texts, of all kinds in turn."""
    tokenizer = load_model(outrider.assets.target_path()).tokenizer
    assert tokenizer is not None
    found: dict[tuple[int, ...], None] = {}
    for texts in zip_longest(*(prompts_of(kind, num) for kind in PROMPT_KINDS)):
        for prompt in texts:
            ids = [] if prompt is None else tokenizer(prompt.text)["input_ids"][:PROMPT_TOKENS]
            if len(ids) == PROMPT_TOKENS:
                found[tuple(ids)] = None
    return [list(ids) for ids in found][:num]


def load(target: str, level: Compile, exact: bool, dtype: str, batch: int, γ: int) -> Engine:
    """The engine for a target, with its draft."""
    source: str | HFModel = "embedded"
    draft: str | HFModel = "embedded"
    if target == "odd":
        source, draft = odd_pair(dtype)
    if target == "inflated":
        small = load_model(outrider.assets.target_path(), dtype=dtype)
        source = HFModel(inflate(small.module, SHAPE), small.tokenizer, "inflated target")
    return outrider.load(
        source,
        draft,
        num_speculative_tokens=γ,
        max_batch_size=batch,
        dtype=dtype,
        compile=level,
        exact=exact,
    )


def odd_pair(dtype: str) -> tuple[HFModel, HFModel]:
    """A random target, and a draft that mostly agrees with it."""
    tokenizer = load_model(outrider.assets.target_path()).tokenizer
    assert tokenizer is not None
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **ODD)
    target = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        draft = copy.deepcopy(target)
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(NOISE * parameter.std() * noise if parameter.ndim > 1 else 0)
    kind = getattr(torch, dtype)
    return (
        HFModel(target.to(kind), tokenizer, "odd target"),
        HFModel(draft.to(kind), tokenizer, "odd draft"),
    )


def timed(engine: Engine, work: Sequence[Sequence[int]], sampling: Sampling) -> tuple[Any, float]:
    """The output tokens, and the seconds that they took."""
    began = time.perf_counter()
    results = engine.generate([list(prompt) for prompt in work], sampling)
    return [result.token_ids for result in results], time.perf_counter() - began


def against_plain(
    engine: Engine, batches: Sequence[int], work: Sequence[Sequence[int]], sampling: Sampling
) -> Iterator[Row]:
    """Compares outputs in batches of each size with plain decoding.

    Yields the number of equal outputs and the earliest position of a difference, None without one.
    """
    target, draft = engine.target, engine.draft
    plain = Engine(target, None, METHODS["plain"], max_batch_size=1)
    timed(plain, work[:1], Sampling(temperature=0, max_new_tokens=8))  # warm-up
    wanted, plain_seconds = timed(plain, work, sampling)
    for batch in batches:
        γ = engine.num_speculative_tokens
        method = METHODS["speculative"]
        fast = Engine(target, draft, method, num_speculative_tokens=γ, max_batch_size=batch)
        timed(fast, work[:batch], Sampling(temperature=0, max_new_tokens=8))
        outputs, seconds = timed(fast, work, sampling)
        differences = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x))
            for x, y in zip(wanted, outputs, strict=True)
            if x != y
        ]
        yield {
            "batch": batch,
            "prompts": len(work),
            "equal": len(work) - len(differences),
            "first": min(differences, default=None),
            "tokens": sum(map(len, outputs)),
            "plain_seconds": plain_seconds,
            "seconds": seconds,
        }


def total(part: dict[str, Any]) -> list[Row]:
    """The rows of all pieces of a part, added up; speeds in tokens per second."""
    groups: dict[tuple[bool, int], list[Row]] = {}
    for piece in part["pieces"].values():
        for row in piece:
            groups.setdefault((row["exact"], row["batch"]), []).append(row)
    rows = []
    for (exact, batch), group in sorted(groups.items()):
        tokens = sum(row["tokens"] for row in group)
        firsts = [row["first"] for row in group if row["first"] is not None]
        rows.append(
            {
                "exact": exact,
                "batch": batch,
                "prompts": sum(row["prompts"] for row in group),
                "equal": sum(row["equal"] for row in group),
                "first": min(firsts, default=None),
                "plain": tokens / sum(row["plain_seconds"] for row in group),
                "speed": tokens / sum(row["seconds"] for row in group),
            }
        )
    return rows


def bars(rows: Sequence[Row]) -> Iterator[tuple[str, str, bool]]:
    """Each bar of a part with the measured value, and whether it is met."""
    loose = {row["batch"]: row["speed"] for row in rows if not row["exact"]}
    for row in rows:
        if row["exact"]:
            batch, share = row["batch"], f"{row['equal']} of {row['prompts']}"
            yield (
                f"batch {batch}: every output equals plain decoding",
                share,
                row["equal"] == row["prompts"],
            )
            if batch in loose:
                cost = loose[batch] / row["speed"] - 1
                met = cost <= COST_BAR
                yield f"batch {batch}: costs at most {COST_BAR:.0%}", f"{cost:+.0%}", met


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = ["# Speculative outputs against plain decoding, token for token"]
    for name, part in report.items():
        about, settings, rows = part["about"], part["asked"], total(part)
        text = (
            f"γ = {settings['gamma']}, temperature 0, {rows[0]['prompts']} prompts of "
            f"{PROMPT_TOKENS} tokens, {settings['tokens']} tokens each.{about['note']}"
        )
        lines += ["", *page.header(f"{name[0].upper()}{name[1:]}", about, text, level=2)]
        heads = ("", "batch", "same output", "first difference", "plain tokens/s", "tokens/s")
        lines += page.table(heads, map(_row, rows)) + page.bars_table(bars(rows))
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        "exact" if row["exact"] else "default",
        str(row["batch"]),
        f"{row['equal']} of {row['prompts']}",
        "" if row["first"] is None else str(row["first"]),
        f"{row['plain']:.0f}",
        f"{row['speed']:.0f}",
    )


def measure(part: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    """Measures the missing pieces of a part; yields a line of progress after each."""
    began = time.perf_counter()
    sampling = Sampling(temperature=0, max_new_tokens=args.tokens, ignore_eos=True)
    work = prompts(args.prompts)
    most = max(args.batch)
    models = {
        exact: load(args.target, args.compile, exact, args.dtype, most, args.gamma)
        for exact in ((True,) if args.exact_only else (False, True))
    }
    yield f"loaded in {time.perf_counter() - began:.0f} s"
    for piece in (p for p in range(args.pieces) if str(p) not in part["pieces"]):
        started = time.perf_counter()
        part["pieces"][str(piece)] = [
            {"exact": exact} | row
            for exact in sorted(models, reverse=bool(piece % 2))
            for row in against_plain(
                models[exact], args.batch, work[piece :: args.pieces], sampling
            )
        ]
        now = time.perf_counter()
        yield f"piece {piece + 1} of {args.pieces} in {now - started:.0f} s"
        if args.minutes is not None and 2 * now - started - began > 60 * args.minutes:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures the missing pieces, and writes the report after each."""
    parser = page.parser(__doc__)
    parser.add_argument("--target", choices=TARGETS, default="embedded")
    parser.add_argument("--compile", choices=LEVELS, default="off")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument(
        "--pieces", type=int, default=5, help="number of pieces that the prompts are split into"
    )
    parser.add_argument("--exact-only", action="store_true", help="do not measure without exact")
    parser.add_argument(
        "--minutes", type=float, help="begin no piece that would end after this time"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="discard the finished pieces of this part"
    )
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(args.threads)
    file = args.out / "exact.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    width = torch.backends.cpu.get_cpu_capability()
    name = f"{TARGETS[args.target]}, {LEVELS[args.compile]}, {args.dtype}, {width}"
    width_setting = os.environ.get("ATEN_CPU_CAPABILITY")
    setting = f"ATEN_CPU_CAPABILITY={width_setting} " if width_setting else ""
    keys = ("batch", "prompts", "tokens", "gamma", "pieces")
    settings = {key: getattr(args, key) for key in keys}
    part = report.get(name)
    if args.fresh or part is None or part["asked"] != settings:
        part = {"asked": settings, "pieces": {}}
    flags = " ".join(f"--{key} {value}" for key, value in settings.items() if key != "batch")
    flags += f" --threads {args.threads}" + (" --exact-only" if args.exact_only else "")
    part["about"] = page.about(
        f"{setting}python -m benchmarks.exact --target {args.target} --compile {args.compile} "
        f"--dtype {args.dtype} --batch {' '.join(map(str, args.batch))} {flags}",
        note=f" {args.note}" if args.note else "",
    )
    report[name] = part
    for line in measure(part, args) if len(part["pieces"]) < args.pieces else ():
        print(line, flush=True)
        if part["pieces"]:
            page.write(args.out, "exact", report, markdown(report))
    left = args.pieces - len(part["pieces"])
    print(f"{name}: {f'{left} pieces left; run it again' if left else 'done'}")


if __name__ == "__main__":
    main()
