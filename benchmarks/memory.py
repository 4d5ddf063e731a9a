"""What keys and values cost in memory, what fewer bits of them cost, and whether memory grows.

    python -m benchmarks.memory [--texts 8] [--tokens 256] [--repeats 3] [--rounds 10000]

Slabs: the embedded pair with slabs as the models compute (float32 on a CPU without bfloat16), in
bfloat16 and in int8, batch 1, eager. Texts are beginnings of Python files. Along each text, in one
pass: KL(p‖p̃) of the target's law with slabs as computed from that with the slabs in question, in
nats per token, and in how many places both have the same argmax. Speeds are of greedy texts of half
that length, target alone and speculative, as multiples of plain decoding with slabs as computed in
the same repeat, the median with the smallest and the largest.

Rounds: a random pair of two small layers and one decodes requests that come and go, four rows at a
time, in an engine that lives for all of them; the process's resident memory at three counts. Once
as it comes, once with int8 slabs and a bound. ``--rounds 0`` or ``--texts 0`` leaves out a part,
whose last results are kept. Writes JSON and a Markdown table.
"""

import argparse
import gc
import json
import os
import random
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from benchmarks.copy_prompts import documents
from benchmarks.copying import Task, gain
from benchmarks.vs_transformers import hardware
from outrider import Engine, Sampling
from outrider.core import Context
from outrider.models import HFModel
from outrider.models.footprint import Footprint
from outrider.models.slabs import KvDtype

KINDS: tuple[KvDtype, ...] = ("auto", "bfloat16", "int8")
GAMMA = 5
MARKS = (0.1, 0.5, 1.0)
VOCAB = 256


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
    """Logits behind each token, read from the model's slabs, (T, V)."""
    law: Any = None  # nothing is sampled
    context = Context.start([text[:1]], law, [0], [0], model.device)
    return model.extend(model.start(context), torch.tensor([text]))[0].double()


def error(target: HFModel, kind: KvDtype, work: list[list[int]]) -> dict[str, float]:
    """How far a kind of slabs moves the target's law."""
    kls, same = [], []
    for text in work:
        exact_TV = logits_along(target, text).log_softmax(-1)
        lower_TV = logits_along(target.storing(kind), text).log_softmax(-1)
        kls.append((exact_TV.exp() * (exact_TV - lower_TV)).sum(-1))
        same.append(exact_TV.argmax(-1) == lower_TV.argmax(-1))
    kl, agree = torch.cat(kls), torch.cat(same).double()
    return {
        "kl": float(kl.mean()),
        "kl_largest": float(kl.max()),
        "agreement": float(agree.mean()),
        "places": len(kl),
    }


def slabs(num: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Bytes, errors and speeds of each kind."""
    pair = outrider.load(method="speculative")
    assert pair.draft is not None
    work = texts(pair.target, num, tokens)
    half = tokens // 2
    sampling = Sampling(temperature=0, max_new_tokens=half, ignore_eos=True)
    asked = [Task(tuple(text[:half]), sampling) for text in work[:4]]
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
            "target_bytes": Footprint.of(pair.target.storing(kind)).slot,
            "draft_bytes": Footprint.of(pair.draft.storing(kind)).slot,
            "plain": speeds[f"plain{suffix}"],
            "speculative": speeds[f"speculative{suffix}"],
        } | error(pair.target, kind, work)
    about = {"texts": num, "tokens": tokens, "repeats": repeats}
    return about | {"dtype": str(pair.target.dtype).removeprefix("torch."), "kinds": rows}


def random_model(layers: int, seed: int) -> HFModel:
    """A small model with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return HFModel(module)


def resident() -> float:
    """Resident memory of this process, in MiB."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def rounds(num: int, **settings: Any) -> dict[str, Any]:
    """Resident memory, in MiB, after shares of so many rounds; texts finished."""
    target, draft = random_model(2, 0), random_model(1, 1)
    method = outrider.METHODS["speculative"]
    engine = Engine(target, draft, method, max_batch_size=4, **settings)
    marks = {max(1, int(share * num)) for share in MARKS}
    found: dict[int, float] = {}
    done = finished = 0
    score = engine.target.score

    def counting(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done in marks:
            gc.collect()
            found[done] = resident()
        return score(*arguments)

    engine.target.score = counting  # type: ignore[method-assign]
    dice = random.Random(0)
    while done < num:
        prompts = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 200))] for _ in range(16)]
        asked = [Sampling(max_new_tokens=dice.randint(1, 120)) for _ in prompts]
        finished += len(engine.generate(prompts, asked))
    return {"resident": found, "texts": finished}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, found = report["about"], report["slabs"]
    lines = [
        "# Memory",
        "",
        f"{about['date']}, {about['hardware']}, {about['threads']} threads, torch "
        f"{about['torch']}.{about['note']}",
        "",
        f"Command: `{about['command']}`",
        "",
        "## Slabs",
        "",
        f"Embedded pair in {found['dtype']}, {found['texts']} texts of {found['tokens']} tokens, "
        f"{found['repeats']} interleaved repeats. `auto` is {found['dtype']} here. In the target's "
        "slabs fewer bits change the law that is sampled, by this KL; in the draft's they do not.",
        "",
        "| slabs | bytes per token, target and draft | nats per token, mean and largest | same "
        "argmax | plain, × | speculative, × | accepted |",
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
    lines += ["", f"1.00 is {plain:.0f} tokens per second.", "", "## Rounds", ""]
    lines += ["| engine | " + " | ".join(_columns(report)) + " | texts |"]
    lines += ["|---|" + "---:|" * (len(MARKS) + 1)]
    for name, row in report["rounds"].items():
        cells = [f"{mib:.1f} MiB" for mib in row["resident"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['texts']} |")
    return "\n".join(lines) + "\n"


def _columns(report: dict[str, Any]) -> list[str]:
    first = next(iter(report["rounds"].values()))
    return [f"after {int(done):,} rounds" for done in first["resident"]]


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['smallest_ratio']:.2f}-{row['largest_ratio']:.2f})"


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="added to the page, such as what else ran")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.out / "memory.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    report["about"] = {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "threads": options.threads,
        "torch": torch.__version__,
        "note": f" {options.note}" if options.note else "",
        "command": f"python -m benchmarks.memory --texts {options.texts} --tokens "
        f"{options.tokens} --repeats {options.repeats} --rounds {options.rounds}",
    }
    if options.rounds:
        report["rounds"] = {
            "as it comes": rounds(options.rounds),
            "int8 slabs, 1 MiB at most": rounds(options.rounds, kv_dtype="int8", max_memory="1MiB"),
        }
    if options.texts:
        report["slabs"] = slabs(options.texts, options.tokens, options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    if "rounds" in report and "slabs" in report:
        page = markdown(report)
        (options.out / "memory.md").write_text(page)
        print(page)


if __name__ == "__main__":
    main()
