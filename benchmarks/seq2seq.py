"""Encoder-decoders: plain, speculative and mentored decoding of a small T5 trained on one task.

    python -m recipes.seq2seq_pair --out DIR        trains the pair, in minutes
    python -m benchmarks.seq2seq --pair DIR         measures it

The task is to turn a function's signature into its bare call; held-out texts were not seen in
training. Exact match is the share of outputs that equal the reference. α is the mean of Σ min(p, q)
over verified positions, and KL the measured divergence of a lossy rule per token. Quality is
measured over all held-out pairs and several seeds in batches of 16; speed on a few pairs, one at a
time, in repeats whose order rotates. Writes JSON and a Markdown table.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks import page
from outrider import Engine, Sampling, load
from outrider.runtime import HFModel, load_model
from outrider.train.models import num_parameters
from recipes.seq2seq_pair import SOURCE_WIDTH, TEXT_WIDTH

BUDGETS = (0.05, 0.2, 0.5, 1.0)
GAMMA = 4
Case = tuple[str, str, Mapping[str, object], float]  # label, method, options, temperature


def cases() -> list[Case]:
    """All measured cases; plain decoding first at each temperature."""
    found: list[Case] = []
    for temperature in (0.0, 1.0):
        found += [(name, name, {}, temperature) for name in ("plain", "speculative")]
        found.append(("prompt-lookup, from the source", "prompt-lookup", {}, temperature))
        if temperature:
            found += [(f"mentored, D={D:g}", "mentored", {"budget": D}, 1.0) for D in BUDGETS]
    return found


def held_out(pair: Path, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Sources and references of the validation split."""
    rows = np.load(pair / "pairs" / "val.npy").astype(np.int64)
    sources, texts = rows[:, :SOURCE_WIDTH], rows[:, SOURCE_WIDTH:]
    decoded = [tokenizer.batch_decode(part, skip_special_tokens=True) for part in (sources, texts)]
    return list(zip(*decoded, strict=True))


def engines(target: HFModel, draft: HFModel, **settings: Any) -> dict[tuple[str, float], Engine]:
    """One engine per case."""
    return {
        (label, temperature): load(target, draft, method, GAMMA, options=options, **settings)
        for label, method, options, temperature in cases()
    }


def quality(
    engine: Engine, pairs: list[tuple[str, str]], temperature: float, seeds: int
) -> dict[str, Any]:
    """Exact match over all pairs, and the statistics of the outputs."""
    matches, stats = [], []
    for seed in range(seeds if temperature else 1):
        sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=TEXT_WIDTH)
        results = engine.generate([source for source, _ in pairs], sampling)
        right = sum(r.text == text for r, (_, text) in zip(results, pairs, strict=True))
        matches.append(right / len(pairs))
        stats.append(results.stats)
    return {
        "exact_match": statistics.fmean(matches),
        "exact_match_per_seed": matches,
        "alpha": statistics.fmean(s.alpha for s in stats),
        "acceptance_rate": statistics.fmean(s.acceptance_rate for s in stats),
        "acceptance_length": statistics.fmean(s.acceptance_length for s in stats),
        "kl_per_token": statistics.fmean(s.kl_per_token for s in stats),
    }


def speeds(
    built: Mapping[tuple[str, float], Engine], pairs: list[tuple[str, str]], repeats: int
) -> dict[tuple[str, float], list[float]]:
    """Tokens per second of each repeat, one output at a time."""
    found: dict[tuple[str, float], list[float]] = {key: [] for key in built}
    for repeat in range(-1, repeats):  # one of warm-up
        keys = list(built)
        shift = repeat % len(keys)
        for key in keys[shift:] + keys[:shift]:
            sampling = Sampling(temperature=key[1], max_new_tokens=TEXT_WIDTH)
            some = pairs[:2] if repeat < 0 else pairs
            results = built[key].generate([source for source, _ in some], sampling)
            if repeat >= 0:
                found[key].append(results.stats.tokens_per_second)
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    library = page.version("transformers", about)
    settings = (
        f"transformers {library}, float32. {about['note']} Target {about['target']}, "
        f"draft {about['draft']}; γ = {GAMMA}. {about['pairs']} held-out pairs, seeds at "
        f"temperature 1: {about['seeds']}; speed from {about['timed']} pairs, one at a time, "
        f"median of {about['repeats']} interleaved repeats (lowest to highest)."
    )
    lines = page.header(
        "Encoder-decoders: a small T5 that writes calls from signatures", about, settings
    )
    lines[-1] += ", after `python -m recipes.seq2seq_pair --out DIR`."
    heads = "|T|exact match|α|acceptance rate|acceptance length|KL per token|tokens/s|to plain"
    lines += page.table(heads.split("|"), map(_row, report["rows"]))
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    plain = row["label"] == "plain"
    shown = ["" if plain else f"{row[key]:.3f}" for key in ("alpha", "acceptance_rate")]
    if row["label"].startswith("prompt"):
        shown[0] = ""
    return (
        row["label"],
        f"{row['temperature']:g}",
        f"{row['exact_match']:.3f}",
        *shown,
        f"{row['acceptance_length']:.2f}",
        f"{row['kl_per_token']:.4f}" if "D=" in row["label"] else "0" if not plain else "",
        f"{row['speed']:.0f} ({min(row['speeds']):.0f}-{max(row['speeds']):.0f})",
        f"{row['to_plain']:.2f}×",
    )


def main() -> None:
    """Parses the options, measures, writes the report and prints the table."""
    parser = page.parser(__doc__, threads=1)
    parser.add_argument("--pair", type=Path, required=True, help="folder that the recipe wrote")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=24, help="number of timed pairs")
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, draft = (
        load_model(options.pair / role / "model", dtype="float32", device="cpu", role=role)
        for role in ("target", "draft")
    )
    pairs = held_out(options.pair, target.tokenizer)
    batched = engines(target, draft, max_batch_size=16)
    measured = {
        key: quality(engine, pairs, key[1], options.seeds) for key, engine in batched.items()
    }
    found = speeds(
        engines(target, draft, max_batch_size=1), pairs[: options.timed], options.repeats
    )
    median = {key: statistics.median(values) for key, values in found.items()}
    rows = [
        {
            "label": label,
            "temperature": temperature,
            **measured[label, temperature],
            "speed": median[label, temperature],
            "speeds": found[label, temperature],
            "to_plain": median[label, temperature] / median["plain", temperature],
        }
        for label, temperature in batched
    ]
    report = {
        "about": page.about(
            f"python -m benchmarks.seq2seq --pair DIR --repeats {options.repeats} "
            f"--seeds {options.seeds} --timed {options.timed} --threads {options.threads}",
            target=_about(target),
            draft=_about(draft),
            pairs=len(pairs),
            seeds=options.seeds,
            timed=min(options.timed, len(pairs)),
            repeats=options.repeats,
            note=options.note,
        ),
        "rows": rows,
    }
    page.publish(options.out, "seq2seq", report, markdown(report))


def _about(model: HFModel) -> str:
    config = model.module.config
    return (
        f"T5 of {num_parameters(model.module):,} parameters ({config.num_layers}+"
        f"{config.num_decoder_layers} layers, width {config.d_model})"
    )


if __name__ == "__main__":
    main()
