"""Compares what ``outrider tune`` chooses with an exhaustive search.

    python -m benchmarks.tune [--pair NAME …] [--minutes 5] [--search-minutes 60] [--out DIR]

The pairs: ``embedded``, the pair that comes with the package; ``smollm2``, SmolLM2-135M-Instruct
with its embedded head (its folder is ``runs/smollm2/model``, or ``--smollm2``); ``poor``, the
embedded target with a draft model whose weights are noisy. Each is tuned first. Then every source
runs at every draft length and batch size, interleaved with plain decoding, again and again until
``--search-minutes`` are over, but at least once; so do sources that tuning had no time for. The
best of many noisy ratios is so by chance in part, so the choice and the best of the search then run
again, in turns. Reported for each batch size: the speed of the choice over that of the fastest of
these, and the errors of all predictions against the search. Fewer prompts, shorter outputs and a
smaller ``--longest`` make a grid that fits less time; ``--smoke`` shows in minutes that all of it
runs.

The report keeps the pairs of earlier runs that are not measured again.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import page
from outrider import assets
from outrider.lab.bench import plan_of
from outrider.lab.metadata import command_line
from outrider.lab.tune.halving import Configuration, Trials
from outrider.lab.tune.machine import PLAIN
from outrider.lab.tune.run import Candidates, tuner_of
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings, Tuning
from outrider.train.ngram import build_ngram

PAIRS = ("embedded", "smollm2", "poor")
WORK = Path("runs/tune")
"""Folder of the poor draft and of n-gram tables, which results name."""
SIZES = (1, 4, 16)
WANTED, WITHIN_AT_1, WITHIN = 0.95, 0.10, 0.15
_BESIDE_PLAIN = 4  # configurations that are compared with one run of plain decoding
_FINALISTS = 4  # configurations of the search that run again
_NOISE = 0.6  # standard deviation of the poor draft's noise, over that of each weight matrix


def main() -> None:
    options = _options()
    file = options.out / "tune.json"
    document: dict[str, Any] = {"pairs": {}}
    if file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    document["about"] = page.about(command_line(), minutes=options.minutes)
    WORK.mkdir(parents=True, exist_ok=True)
    for name in options.pair or PAIRS:
        print(f"{name}: tuning", flush=True)
        ngrams = WORK / f"{name}.ngram"
        ngrams.unlink(missing_ok=True)  # tune counts the table
        tuner = _tuner(*_pair(name, options.smollm2), ngrams, options)
        tuning = tuner.run()
        trials = search(tuner, options)
        last = finals(tuner, tuning, trials, options)
        document["pairs"][name] = compared(tuning, trials, last) | {"command": command_line()}
        page.write(options.out, "tune", document, markdown(document))
    print(markdown(document))


def search(tuner: Tuner, options: argparse.Namespace) -> dict[int, Trials]:
    """Runs every configuration, by batch size, as often as there is time for all of them."""
    found = {size: Trials() for size in options.batch_size}
    clock, repeat, last = tuner.machine.clock, 0, 0.0
    ends = clock() + 60 * options.search_minutes
    while not repeat or (repeat < options.repeats and clock() + last <= ends):
        began = clock()
        for size in options.batch_size:
            _run_all(tuner, _grid(tuner, size), options, repeat, found[size])
        repeat, last = repeat + 1, clock() - began
        print(f"  searched {repeat} times", flush=True)
    return found


def finals(
    tuner: Tuner, tuning: Tuning, found: dict[int, Trials], options: argparse.Namespace
) -> dict[int, Trials]:
    """Runs plain decoding, the choice and the best of the search again, by batch size."""
    assert tuning.answer is not None
    last = {size: Trials() for size in found if size in tuning.answer.best}
    for size, trials in last.items():
        ratios = _ratios(found[size])
        best = sorted(ratios, key=lambda each: -ratios[each])[:_FINALISTS]
        chosen = tuning.answer.best[size].configuration
        these = list(dict.fromkeys([chosen, *best]))
        for repeat in range(options.final_repeats):
            _run_all(tuner, these, options, repeat, trials)
    return last


def _ratios(trials: Trials) -> dict[Configuration, float]:
    """The speeds over plain decoding's."""
    found = {each: (trials.ratio(each) or {"ratio": 1.0})["ratio"] for each in trials.repeats}
    return found | {each: 1.0 for each in found if each.is_plain}


def _grid(tuner: Tuner, size: int) -> list[Configuration]:
    """Every configuration of a batch size that works."""
    return [Configuration(PLAIN, 0, size)] + [
        Configuration(source, length, size)
        for source in tuner.tuning.sources
        if source.name not in tuner.tuning.errors
        for length in source.lengths
    ]


def _run_all(
    tuner: Tuner,
    configurations: Sequence[Configuration],
    options: argparse.Namespace,
    repeat: int,
    found: Trials,
) -> None:
    """Runs configurations of a batch size once, in random order, and plain decoding before every
    few of them: only what runs within seconds is comparable while other work comes and goes."""
    drafting = [each for each in configurations if not each.is_plain]
    size = configurations[0].batch_size
    num = max(size, min(tuner.machine.num_prompts, options.prompts))
    prompts = [index % tuner.machine.num_prompts for index in range(num)]
    batches = [prompts[start : start + size] for start in range(0, num - size + 1, size)]
    random.Random(repeat).shuffle(drafting)
    for start in range(0, len(drafting), _BESIDE_PLAIN):
        for each in (Configuration(PLAIN, 0, size), *drafting[start : start + _BESIDE_PLAIN]):
            run = tuner.machine.run(
                each.source, each.length, batches, options.max_new_tokens, repeat
            )
            found.add(each, repeat * len(drafting) + start, repeat, run)


def compared(tuning: Tuning, found: dict[int, Trials], last: dict[int, Trials]) -> dict[str, Any]:
    """The choice against the best of the search, both as they ran last, and predictions against the
    speeds of the search."""
    assert tuning.answer is not None
    sizes = {}
    for size, trials in found.items():
        if size not in tuning.answer.best:
            continue
        ratios, finalists = _ratios(trials), _ratios(last[size])
        best = max(finalists, key=lambda each: finalists[each])
        chosen = tuning.answer.best[size].configuration
        errors = [
            each.predicted_ratio / ratios[each.configuration] - 1
            for each in tuning.answer.estimates
            if each.configuration in ratios and not each.configuration.is_plain
        ]
        sizes[size] = {
            "chosen": str(chosen),
            "chosen_ratio": finalists[chosen],
            "best": str(best),
            "best_ratio": finalists[best],
            "share_of_best": finalists[chosen] / finalists[best],
            "median_error": median(map(abs, errors)),
            "largest_error": max(errors, key=abs),
            "repeats": min(map(len, trials.repeats.values())),
            "within": sum(abs(e) <= (WITHIN_AT_1 if size == 1 else WITHIN) for e in errors),
            "configurations": len(errors),
            "ratios": {str(each): ratio for each, ratio in ratios.items()},
            "finalists": {str(each): ratio for each, ratio in finalists.items()},
        }
    return {"tuning": tuning.as_dict(), "batch_sizes": sizes}


def markdown(document: dict[str, Any]) -> str:
    """The comparison as a page."""
    about = document["about"]
    settings = (
        f"tuned for {about['minutes']:g} minutes. Ratios are to plain decoding. A prediction is "
        f"good within {WITHIN_AT_1:.0%} at batch 1 and {WITHIN:.0%} elsewhere."
    )
    of_choices = ("pair", "batch", "chosen", "ratio", "best of the search", "ratio", "share")
    heads = (*of_choices, "good predictions", "median error", "largest", "repeats")
    rows = (
        (name, size, *_cells(each))
        for name, pair in document["pairs"].items()
        for size, each in pair["batch_sizes"].items()
    )
    commands = {name: pair.get("command", "") for name, pair in document["pairs"].items()}
    title = "What `outrider tune` chooses, against an exhaustive search"
    lines = page.header(title, about, settings) + page.table(heads, rows, left=len(heads))
    lines += ["", *(f"- {name}: `{command}`" for name, command in commands.items() if command)]
    return "\n".join(lines) + "\n"


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    share = f"{each['share_of_best']:.3f}"
    return (
        each["chosen"],
        f"{each['chosen_ratio']:.2f}",
        each["best"],
        f"{each['best_ratio']:.2f}",
        share if each["share_of_best"] >= WANTED else f"**{share}**",
        f"{each['within']} of {each['configurations']}",
        f"{each['median_error']:.0%}",
        f"{each['largest_error']:+.0%}",
        str(each["repeats"]),
    )


def _tuner(
    target: str, draft: str, data: str, ngram_file: Path, options: argparse.Namespace
) -> Tuner:
    sizes = tuple(options.batch_size)
    plan = plan_of(
        {
            "target": target,
            "methods": ["plain"],
            "data": [data],
            "batch_sizes": list(sizes),
            "max_new_tokens": options.max_new_tokens,
            "compile": options.compile,
        }
    )
    settings = TuneSettings(sizes, options.minutes, options.max_new_tokens)
    given = Candidates((draft,), (), options.longest, None, ngram_file, build_ngram)
    return tuner_of(plan, settings, given, lambda stage, share: print(f"  {stage}", flush=True))


def _pair(name: str, smollm2: Path) -> tuple[str, str, str]:
    """Target, draft and prompts."""
    if name == "smollm2":
        return str(smollm2), "embedded:smollm2-eagle3", "builtin:prose"
    if name == "embedded":
        return "embedded", "embedded", "builtin:code"
    return "embedded", str(noisy_draft(WORK / "poor-draft")), "builtin:code"


def noisy_draft(folder: Path) -> Path:
    """The embedded draft with noise on its weight matrices."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(assets.draft_path())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn_like(parameter, dtype=torch.float32)
                parameter.add_((_NOISE * parameter.float().std() * noise).to(parameter.dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets.draft_path()).save_pretrained(folder)
    return folder


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--pair", action="append", choices=PAIRS)
    parser.add_argument("--smollm2", type=Path, default=Path("runs/smollm2/model"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--search-minutes", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=9, help="of the search, at most")
    parser.add_argument("--final-repeats", type=int, default=12)
    parser.add_argument("--batch-size", type=int, action="append")
    parser.add_argument("--prompts", type=int, default=8, help="of a run, or the batch size")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--compile", default="off")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    options.batch_size = sorted(options.batch_size or SIZES)
    if options.smoke:
        options.batch_size, options.repeats, options.prompts = [1], 1, 1
        options.final_repeats = 1
        options.longest, options.max_new_tokens = 2, 24
    return options


if __name__ == "__main__":
    main()
