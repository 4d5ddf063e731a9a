"""What keys and values cost in memory, what fewer bits of them cost, and whether memory grows.

    python -m benchmarks.memory --rounds 0 [--texts 8] [--tokens 256] [--timed 2] [--repeats 3]
    python -m benchmarks.memory --texts 0 [--rounds 10000] [--engines compiled bounded]

KV buffers: the embedded pair with KV buffers as the models compute (float32 on a CPU without
bfloat16), in bfloat16 and in int8, batch 1, eager. Texts are beginnings of Python files. Along each
text, in one
pass: KL(p‖p̃) of the target's distribution with KV buffers as computed from that with the KV
buffers in question, in nats per token, and in how many places both have the same argmax. Speeds are
of greedy texts of half that length behind some of them, target alone and speculative, as multiples
of plain decoding with KV buffers as computed in the same repeat, the median with the smallest and
the largest.

Rounds: engines that live for all requests, which come and go; the process's resident memory by
rounds done (``benchmarks.memory_rounds``). It is read as the operating system has it: memory that
the allocator keeps for later counts. Each engine's row is kept until it is measured again, so that
they can run one at a time, which also gives each a process of its own. Writes JSON and Markdown.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

import outrider
from benchmarks.copy_prompts import documents
from benchmarks.copying import Task, gain
from benchmarks.memory_rounds import ENGINES, rounds
from benchmarks.vs_transformers import hardware
from outrider import Sampling
from outrider.core import Context
from outrider.runtime import HFModel
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.runtime.kv_cache.storage import KvDtype

KINDS: tuple[KvDtype, ...] = ("auto", "bfloat16", "int8")
GAMMA = 5
COLUMNS = 4  # of resident memory, on the page


def texts(target: HFModel, num: int, tokens: int) -> list[list[int]]:
    """Beginnings of files, that long."""
    assert target.tokenizer is not None
    found = []
    for document in documents():
        ids = target.tokenizer(document.text[: 12 * tokens])["input_ids"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == num:
            break
    return found


@torch.inference_mode()
def logits_along(model: HFModel, text: list[int]) -> torch.Tensor:
    """Logits behind each token, read from the model's KV buffers, (T, V)."""
    distribution: Any = None  # nothing is sampled
    context = Context.start([text[:1]], distribution, [0], [0], model.device)
    return model.extend(model.start(context), torch.tensor([text]))[0].double()


def error(target: HFModel, kind: KvDtype, work: list[list[int]]) -> dict[str, float]:
    """How far a kind of KV buffers moves the target's distribution."""
    kls, same = [], []
    for text in work:
        exact_TV = logits_along(target, text).log_softmax(-1)
        lower_TV = logits_along(target.with_kv_dtype(kind), text).log_softmax(-1)
        kls.append((exact_TV.exp() * (exact_TV - lower_TV)).sum(-1))
        same.append(exact_TV.argmax(-1) == lower_TV.argmax(-1))
    kl, agree = torch.cat(kls), torch.cat(same).double()
    return {
        "kl": float(kl.mean()),
        "kl_largest": float(kl.max()),
        "agreement": float(agree.mean()),
        "places": len(kl),
    }


def buffers(num: int, tokens: int, timed: int, repeats: int) -> dict[str, Any]:
    """Bytes, errors and speeds of each kind."""
    pair = outrider.load(method="speculative")
    assert pair.draft is not None
    work = texts(pair.target, num, tokens)
    half = tokens // 2
    sampling = Sampling(temperature=0, max_new_tokens=half, ignore_eos=True)
    asked = [Task(tuple(text[:half]), sampling) for text in work[:timed]]
    engines = {}
    for kind in KINDS:
        for method in ("plain", "speculative"):
            name = method if kind == "auto" else f"{method}, {kind}"
            engines[name] = outrider.load(pair.target, pair.draft, method, GAMMA, kv_dtype=kind)
    speeds = gain(engines, asked, repeats)
    rows = {}
    for kind in KINDS:
        suffix = "" if kind == "auto" else f", {kind}"
        rows[kind] = {
            "target_bytes": Footprint.of(pair.target.with_kv_dtype(kind)).slot,
            "draft_bytes": Footprint.of(pair.draft.with_kv_dtype(kind)).slot,
            "plain": speeds[f"plain{suffix}"],
            "speculative": speeds[f"speculative{suffix}"],
        } | error(pair.target, kind, work)
    about = {"texts": num, "tokens": tokens, "timed": timed, "repeats": repeats}
    return about | {"dtype": str(pair.target.dtype).removeprefix("torch."), "kinds": rows}


def markdown(report: dict[str, Any]) -> str:
    """The parts there are, as a page."""
    lines = ["# Memory"]
    if "buffers" in report:
        lines += ["", "## KV buffers", "", *_buffer_lines(report["buffers"])]
    if report.get("rounds"):
        lines += ["", "## Rounds", "", *_round_lines(report["rounds"])]
    return "\n".join(lines) + "\n"


def _buffer_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        *_about(found["about"]),
        f"Embedded pair in {found['dtype']}, {found['texts']} texts of {found['tokens']} tokens; "
        f"speeds on {found['timed']} of them, {found['repeats']} interleaved repeats. `auto` is "
        f"{found['dtype']} here. In the target's KV buffers fewer bits change the distribution "
        "that is sampled, by this KL; in the draft's they do not.",
        "",
        "| KV buffers | bytes per token, target and draft | nats per token, mean and largest | "
        "same argmax | plain, × | speculative, × | accepted |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, row in found["kinds"].items():
        lines.append(
            f"| {kind} | {row['target_bytes']:,} + {row['draft_bytes']:,} | {row['kl']:.1e}, "
            f"{row['kl_largest']:.1e} | {row['agreement']:.2%} of {row['places']} | "
            f"{_ratio(row['plain'])} | {_ratio(row['speculative'])} | "
            f"{row['speculative']['acceptance_rate']:.0%} |"
        )
    plain = found["kinds"]["auto"]["plain"]["tokens_per_second"]
    return [*lines, "", f"1.00 is {plain:.0f} tokens per second."]


def _round_lines(rows: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in rows.items():
        read = {int(done): mib for done, mib in row["resident"].items()}
        shown = list(read)[:: max(1, (len(read) - 1) // (COLUMNS - 1))]
        lines += [
            f"### {name[0].upper()}{name[1:]}",
            "",
            *_about(row["about"]),
            "| " + " | ".join(f"{done:,} rounds" for done in shown) + " | largest less smallest "
            "| slope per 1,000 rounds | texts |",
            "|" + "---:|" * (len(shown) + 3),
            "| " + " | ".join(f"{read[done]:.1f} MiB" for done in shown) + f" | "
            f"{row['range']:.1f} MiB | {row['slope']:+.1f} KiB | {row['texts']} |",
            "",
        ]
    return lines[:-1]


def _about(about: dict[str, Any]) -> list[str]:
    return [
        f"{about['date']}, {about['hardware']}, {about['threads']} threads, torch "
        f"{about['torch']}.{about['note']}",
        "",
        f"Command: `{about['command']}`",
        "",
    ]


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['smallest_ratio']:.2f}-{row['largest_ratio']:.2f})"


def main() -> None:
    """Parses the options, measures, and writes the report after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=8, help="0 leaves KV buffers as they were")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--timed", type=int, default=2, help="texts that speeds are measured on")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10_000, help="0 leaves rounds as they were")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="added to the page, such as what else ran")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.out / "memory.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def keep(where: dict[str, Any], name: str, found: dict[str, Any], asked: str) -> None:
        about = {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "threads": options.threads,
            "torch": torch.__version__,
            "note": f" {options.note}" if options.note else "",
            "command": f"python -m benchmarks.memory {asked}",
        }
        where[name] = {"about": about} | found
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "memory.md").write_text(markdown(report))

    for key in options.engines if options.rounds else ():
        name, make = ENGINES[key]
        found = rounds(options.rounds, make())
        asked = f"--texts 0 --rounds {options.rounds} --engines {key}"
        keep(report.setdefault("rounds", {}), name, found, asked)
    if options.texts:
        found = buffers(options.texts, options.tokens, options.timed, options.repeats)
        asked = f"--rounds 0 --texts {options.texts} --tokens {options.tokens} "
        asked += f"--timed {options.timed} --repeats {options.repeats}"
        keep(report, "buffers", found, asked)
    print(markdown(report))


if __name__ == "__main__":
    main()
