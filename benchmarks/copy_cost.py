"""The cost of drafts by copying, measured along a text of the corpus without running a model.

    python -m benchmarks.copy_cost [--threads 2] [--out DIR]

Microseconds per draft and bytes per token at 8,000 tokens of context, for 1 row and for 16. The
gain of the same drafts is in the plan ``copying`` (``benchmarks.run_plan``). Writes JSON and a
Markdown page.

Each round commits the drafted tokens that match the text, and one token more. Timed is ``propose``,
which includes reading the new tokens and updating the index.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import outrider
from benchmarks import page
from benchmarks.copy_prompts import documents
from outrider import Sampling
from outrider.core import Budget, Context, Lengths
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.sampling import Warp

CONTEXT = 8000
CORPUS = 50_000
ROWS = (1, 16)
SHIFT = 53
MICROSECONDS, BYTES = 50.0, 100.0  # bars, per draft and row, and per token of an index


@dataclass(frozen=True)
class Configuration:
    """A drafter, perhaps with a corpus of earlier texts, and its budget in tokens."""

    name: str
    drafter: PromptLookup | SuffixDecoding
    num_tokens: int


def configurations(earlier: list[int]) -> Iterator[Configuration]:
    """All drafters whose cost is measured; ``earlier`` is the corpus that some of them know."""
    yield Configuration("prompt lookup", PromptLookup(), 10)
    yield Configuration("suffix", SuffixDecoding(), 16)
    for shape in ("chain", "tree"):
        drafter = SuffixDecoding(shape)
        for begin in range(0, len(earlier), 1000):
            drafter.corpus.add(earlier[begin : begin + 1000])
        tokens = drafter.corpus.num_tokens
        yield Configuration(f"suffix, {shape}, {tokens:,} tokens of corpus", drafter, 16)


@torch.inference_mode()
def cost(
    configuration: Configuration, text: list[int], context_length: int, rows: int
) -> dict[str, Any]:
    """Microseconds per draft and row along the text, and bytes per token of the rows' indices.

    Each row begins ``SHIFT`` tokens later in the text than the row before.
    """
    texts = [text[SHIFT * row :] for row in range(rows)]
    distribution = Warp([Sampling(temperature=0)] * rows, max(text) + 1)
    prompts = [each[:context_length] for each in texts]
    context = Context.start(prompts, distribution, [0] * rows, range(rows))
    drafter, budget = configuration.drafter, Budget(configuration.num_tokens)
    began = time.perf_counter()
    state: Any = drafter.start(context)
    started = time.perf_counter() - began
    times, drafted, accepted = [], 0, 0
    while max(context.lengths) + SHIFT * rows + configuration.num_tokens < len(text):
        rng = context.rng
        began = time.perf_counter()
        draft = drafter.propose(state, context, budget, rng)
        times.append(1e6 * (time.perf_counter() - began) / rows)
        new = [
            each[at : at + 1 + _num_matching(tokens, parents, mask, each, at)]
            for tokens, parents, mask, each, at in zip(
                draft.tokens_BN.tolist(),
                draft.parents_BN.tolist(),
                draft.mask_BN.tolist(),
                texts,
                context.lengths,
                strict=True,
            )
        ]
        lengths = [len(each) for each in new]
        drafted += int(draft.num_drafted_B.sum())
        accepted += sum(lengths) - rows
        padded = [[*each, *[0] * (max(lengths) - len(each))] for each in new]
        context.append(torch.tensor(padded), Lengths.of(lengths))
    ordered = statistics.quantiles(times, n=20)
    held = sum(getattr(reader, "index", reader).num_bytes for reader in state.readers)
    return {
        "rows": rows,
        "rounds": len(times),
        "drafted": drafted / len(times) / rows,
        "accepted": accepted / len(times) / rows,
        "median": statistics.median(times),
        "5th": ordered[0],
        "lower_quartile": ordered[4],
        "upper_quartile": ordered[14],
        "95th": ordered[18],
        "bytes": held / sum(state.read),
        "start_per_token": 1e6 * started / context_length / rows,
    }


def _num_matching(
    tokens: list[int], parents: list[int], mask: list[bool], text: list[int], position: int
) -> int:
    """The number of drafted tokens along a path that match the text from a position on."""
    node, depth = 0, 0
    for child in range(1, len(tokens)):
        if mask[child] and parents[child] == node and tokens[child] == text[position + depth]:
            node, depth = child, depth + 1
    return depth


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, bool]]:
    """Each bar with the worst measured value, and whether it is met."""
    largest = max(row["bytes"] for row in rows)
    found = [("an index takes at most 100 bytes per token", largest, largest <= BYTES)]
    for number in sorted({row["rows"] for row in rows}):
        slowest = max(row["median"] for row in rows if row["rows"] == number)
        text = f"every draft takes at most 50 µs per row, rows: {number}"
        found.append((text, slowest, slowest <= MICROSECONDS))
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    settings = f"at {about['context']:,} tokens of context."
    heads = (
        "|rows|µs per row, median|5 %|quartiles|95 %|tokens drafted|accepted|bytes per token|"
        "µs per token of prompt"
    )
    found = [(text, f"{worst:.2f}", met) for text, worst, met in bars(report["cost"])]
    lines = page.header("Cost of copying drafts", about, settings)
    lines += page.table(heads.split("|"), map(_row, report["cost"]))
    return "\n".join(lines + page.bars_table(found, "worst")) + "\n"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        str(row["rows"]),
        f"{row['median']:.0f}",
        f"{row['5th']:.0f}",
        f"{row['lower_quartile']:.0f}-{row['upper_quartile']:.0f}",
        f"{row['95th']:.0f}",
        f"{row['drafted']:.1f}",
        f"{row['accepted']:.1f}",
        f"{row['bytes']:.0f}",
        f"{row['start_per_token']:.1f}",
    )


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = outrider.load(method="plain").target.tokenizer
    assert tokenizer is not None
    ids = [token for each in documents() for token in tokenizer(each.text)["input_ids"]]
    text, earlier = ids[: CONTEXT + 2500], ids[CONTEXT + 2500 :][:CORPUS]
    command = f"python -m benchmarks.copy_cost --threads {options.threads}"
    report = {
        "about": page.about(command, context=CONTEXT),
        "cost": [
            {"name": each.name} | cost(each, text, CONTEXT, rows)
            for rows in ROWS
            for each in configurations(earlier)
        ],
    }
    page.publish(options.out, "copy_cost", report, markdown(report))


if __name__ == "__main__":
    main()
