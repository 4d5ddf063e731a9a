"""Memory of KV caches, the error of storing them in fewer bits, and memory growth over time.

    python -m benchmarks.memory --rounds 0 [--texts 8] [--tokens 256] [--timed 2] [--repeats 3]
    python -m benchmarks.memory --texts 0 [--rounds 10000] [--engines compiled bounded tree …]

KV buffers: the embedded pair with KV buffers in the models' precision (float32 on a CPU without
bfloat16), in bfloat16 and in int8, batch 1, eager. Texts are beginnings of Python files. One
forward pass over each text gives KL(p‖p̃), in nats per token, between the target's distributions
with full-precision and with reduced KV buffers, and the share of positions where both have the same
argmax. Speeds are measured on greedy continuations of some texts, by half their length, with the
target alone and speculatively. They are multiples of plain decoding with full-precision KV buffers
in the same repeat: the median, the smallest and the largest.

Rounds: each engine lives for many requests that come and go, and the resident memory of the process
is recorded by the number of rounds (``benchmarks.memory_rounds``). It includes memory that the
allocator keeps for later, and KV buffers, which are as long as the batch needs: what is in use
besides tensors tells filling from growth. The row of an engine is kept until it is measured again,
so engines can run one at a time, each in its own process. Writes JSON and Markdown.
"""

import json
from typing import Any

import torch

import outrider
from benchmarks import page
from benchmarks.copy_prompts import documents
from benchmarks.memory_rounds import ENGINES, rounds
from benchmarks.memory_speeds import Task, gain
from outrider import Sampling
from outrider.core import Context
from outrider.runtime import HFModel
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.runtime.kv_cache.storage import KvDtype

KINDS: tuple[KvDtype, ...] = ("auto", "bfloat16", "int8")
GAMMA = 5
COLUMNS = 4  # of resident memory, on the page
BUFFERS = "slabs"  # key of KV buffers in the JSON document; earlier reports have it


def texts(target: HFModel, num: int, tokens: int) -> list[list[int]]:
    """Beginnings of ``num`` files, ``tokens`` tokens each."""
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
    """Logits after each token, computed through the model's KV buffers, (T, V)."""
    distribution: Any = None  # nothing is sampled
    context = Context.start([text[:1]], distribution, [0], [0], model.device)
    return model.extend(model.start(context), torch.tensor([text]))[0].double()


def error(target: HFModel, kind: KvDtype, work: list[list[int]]) -> dict[str, float]:
    """How much a precision of KV buffers changes the target's distribution."""
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
    """Bytes, errors and speeds of each precision."""
    pair = outrider.load(method="speculative")
    assert pair.draft is not None
    work = texts(pair.target, num, tokens)
    half = tokens // 2
    sampling = Sampling(temperature=0, max_new_tokens=half, ignore_eos=True)
    timed_tasks = [Task(tuple(text[:half]), sampling) for text in work[:timed]]
    engines = {}
    for kind in KINDS:
        for method in ("plain", "speculative"):
            name = method if kind == "auto" else f"{method}, {kind}"
            engines[name] = outrider.load(pair.target, pair.draft, method, GAMMA, kv_dtype=kind)
    speeds = gain(engines, timed_tasks, repeats)
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
    """The measured parts as a page."""
    lines = ["# Memory"]
    if BUFFERS in report:
        lines += ["", *_buffer_lines(report[BUFFERS])]
    if report.get("rounds"):
        lines += ["", "## Rounds", *_round_lines(report["rounds"])]
    return "\n".join(lines) + "\n"


def _buffer_lines(found: dict[str, Any]) -> list[str]:
    heads = (
        "KV buffers",
        "bytes per token, target and draft",
        "nats per token, mean and largest",
        "same argmax",
        "plain, ×",
        "speculative, ×",
        "accepted",
    )
    rows = (
        (
            kind,
            f"{row['target_bytes']:,} + {row['draft_bytes']:,}",
            f"{row['kl']:.1e}, {row['kl_largest']:.1e}",
            f"{row['agreement']:.2%} of {row['places']}",
            _ratio(row["plain"]),
            _ratio(row["speculative"]),
            f"{row['speculative']['acceptance_rate']:.0%}",
        )
        for kind, row in found["kinds"].items()
    )
    plain = found["kinds"]["auto"]["plain"]["tokens_per_second"]
    return [
        *page.header("KV buffers", found["about"], found["about"]["note"], level=2),
        "",
        f"Embedded pair in {found['dtype']}, {found['texts']} texts of {found['tokens']} tokens; "
        f"speeds on {found['timed']} of them, {found['repeats']} interleaved repeats. `auto` is "
        f"{found['dtype']} here. Fewer bits in the target's KV buffers change the sampled "
        "distribution by this KL; fewer bits in the draft's do not.",
        *page.table(heads, rows),
        "",
        f"1.00 is {plain:.0f} tokens per second.",
    ]


def _round_lines(rows: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in rows.items():
        read = {int(done): mib for done, mib in row["resident"].items()}
        shown = list(read)[:: max(1, (len(read) - 1) // (COLUMNS - 1))]
        heads = [f"{done:,} rounds" for done in shown]
        heads += ["largest minus smallest", "slope per 1,000 rounds", "texts"]
        cells = [f"{read[done]:.1f} MiB" for done in shown]
        cells += [f"{row['range']:.1f} MiB", f"{row['slope']:+.1f} KiB", row["texts"]]
        if "tensors" in row:
            heads += ["tensors, most in either half", "other in use, first and last"]
            heads += ["its slope in the second half"]
            cells += [" and ".join(f"{mib:.1f}" for mib in row["tensors"]) + " MiB"]
            cells += [" and ".join(f"{mib:.1f}" for mib in row["other"]) + " MiB"]
            cells += [f"{row['other_slope']:+.1f} KiB"]
        title = f"{name[0].upper()}{name[1:]}"
        lines += ["", *page.header(title, row["about"], row["about"]["note"], level=3)]
        lines += page.table(heads, [cells], left=0)
    return lines


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['smallest_ratio']:.2f}-{row['largest_ratio']:.2f})"


def main() -> None:
    """Parses the options, measures, and writes the report after each part."""
    parser = page.parser(__doc__)
    parser.add_argument(
        "--texts", type=int, default=8, help="0 keeps the earlier results of KV buffers"
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--timed", type=int, default=2, help="number of texts for speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=10_000, help="0 keeps the earlier results of rounds"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.out / "memory.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def keep(where: dict[str, Any], name: str, found: dict[str, Any], flags: str) -> None:
        about = page.about(f"python -m benchmarks.memory {flags}", note=options.note)
        where[name] = {"about": about} | found
        page.write(options.out, "memory", report, markdown(report))

    for key in options.engines if options.rounds else ():
        life = ENGINES[key]
        found = rounds(options.rounds, life.make(), life.sampling, life.requests)
        flags = f"--texts 0 --rounds {options.rounds} --engines {key}"
        keep(report.setdefault("rounds", {}), life.name, found, flags)
    if options.texts:
        found = buffers(options.texts, options.tokens, options.timed, options.repeats)
        flags = f"--rounds 0 --texts {options.texts} --tokens {options.tokens} "
        flags += f"--timed {options.timed} --repeats {options.repeats}"
        keep(report, BUFFERS, found, flags)
    print(markdown(report))


if __name__ == "__main__":
    main()
