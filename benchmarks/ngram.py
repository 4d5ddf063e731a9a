"""An n-gram file counted on 40 million tokens: its size, speed and acceptance.

    python -m benchmarks.ngram [--tokens 40000000] [--order 4] [--threads 2] [--out DIR]

The corpus is the installed Python source (standard library and packages), every file once, in the
order of its hash. One file in a hundred is held out, the same ones as for the embedded models. The
corpus is counted with the embedded pair's tokenizer, with all grams and without those seen once,
and with a large vocabulary, a byte-level BPE trained on a part of the corpus. Tokens and tables are
kept in ``--work``, so a second run begins with the measurements.

Opening includes the checksum. It is timed with the file in the page cache and after dropping it
from there. Drafting is ``propose`` for 1 and 16 rows, γ = 5, with contexts from held-out text;
times are medians and quartiles per drafted token. Argmaxes need no distribution. Draws do, and with
sampling parameters other than temperature 1, the distribution is warped like the target's.
Distribution, warping and drawing are also timed separately, one row at a time.

α is measured on continuations of held-out beginnings by the target. At temperature 0, it is how
often the table's argmax is the target's. At temperature 1, it is the mean of Σ min(p, q) for
sampled drafts, and of p(argmax q) for drafts of argmaxes.

Legend: B rows, T tokens, V vocabulary.
"""

import hashlib
import json
import os
import resource
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import outrider
from benchmarks import page
from outrider import Sampling
from outrider.assets import target_path
from outrider.core import Budget, Context, Prefix, Role, draw
from outrider.drafters.ngram.drafter import How, NgramDrafter, vocabulary_digest
from outrider.drafters.ngram.table import NgramTable
from outrider.runtime import HFModel, load_tokenizer
from outrider.sampling import Warp
from outrider.train.ngram import build_ngram
from outrider.train.ngram_documents import encoded
from outrider.train.tokenizer import train_tokenizer

LEVIATHAN = {1: "0.03 to 0.13", 2: "0.05 to 0.23"}  # Table 3: 11B and larger targets
WARPED = Sampling(temperature=0.8, top_p=0.95)
DRAWS: dict[str, tuple[How, Sampling]] = {
    "argmax": ("argmax", Sampling()),
    "sample": ("sample", Sampling()),
    "sample, temperature 0.8, top-p 0.95": ("sample", WARPED),
}
BARS = {"file, MB": 400.0, "opening, s": 1.0, "argmax, µs per token": 20.0}
GAMMA = 5
EMBEDDED = 6144  # entries of the embedded pair's vocabulary
_MAX_FILE_BYTES = 1_000_000
_TOKENIZER_FILES = 3000
_HELD_OUT_FILES = 100
_NEW_TOKENS = 128


def corpus(held_out: bool) -> Iterator[str]:
    """The texts of one split, in the order of their hashes."""
    paths = sysconfig.get_paths()
    files: dict[str, Path] = {}
    for root in {paths["stdlib"], paths["purelib"], paths["platlib"]}:
        for path in Path(root).rglob("*.py"):
            if path.is_file() and 0 < path.stat().st_size <= _MAX_FILE_BYTES:
                files[hashlib.sha256(path.read_bytes()).hexdigest()] = path
    for digest, path in sorted(files.items()):
        if (int(digest[:8], 16) % 100 == 0) == held_out:
            yield path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def tokenizer_of(work: Path, vocab_size: int) -> Any:
    """The embedded pair's tokenizer, or one of another size, trained on a part of the corpus."""
    if vocab_size == EMBEDDED:
        return load_tokenizer(target_path())
    folder = work / f"tokenizer-{vocab_size}"
    if not folder.exists():
        part = islice(corpus(held_out=False), _TOKENIZER_FILES)
        train_tokenizer(part, vocab_size).save_pretrained(folder)
    return load_tokenizer(folder)


def tokens(work: Path, wanted: int, vocab_size: int) -> np.ndarray:
    """At most ``wanted`` tokens of the corpus, all documents in one array."""
    file = work / f"tokens-{wanted}-{vocab_size}.bin"
    if not file.exists():
        written = 0
        unfinished = file.with_suffix(".part")
        with open(unfinished, "wb") as stream:
            for ids in encoded(tokenizer_of(work, vocab_size), corpus(held_out=False)):
                stream.write(np.array(ids, dtype=np.uint32).tobytes())
                written += len(ids)
                if written >= wanted:
                    break
        unfinished.rename(file)
    return np.memmap(file, dtype=np.uint32, mode="r")[:wanted]


def build(
    work: Path, wanted: int, vocab_size: int, order: int, min_count: int
) -> tuple[Path, dict[str, Any]]:
    """The file of the table, and the time and memory that building it took."""
    file = work / f"ngram-{wanted}-{vocab_size}-{order}-{min_count}.safetensors"
    figures = file.with_suffix(".json")
    if not figures.exists():
        ids, tokenizer = tokens(work, wanted, vocab_size), tokenizer_of(work, vocab_size)
        ends = [0, *(np.flatnonzero(ids == tokenizer.eos_token_id) + 1).tolist(), len(ids)]
        documents: Any = (ids[a:b] for a, b in pairwise(ends) if a < b)
        began = time.perf_counter()
        digest = vocabulary_digest(tokenizer.get_vocab())
        numbers = build_ngram(file, documents, len(tokenizer), order, min_count, vocabulary=digest)
        numbers |= {
            "seconds": time.perf_counter() - began,
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "vocabulary": vocab_size,
            "order": order,
            "min_count": min_count,
        }
        figures.write_text(json.dumps(numbers))
    return file, json.loads(figures.read_text())


def opening(file: Path, repeats: int = 5) -> dict[str, float]:
    """Median seconds to open a table, with the file in the page cache and without."""
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(repeats):
        for kind, found in seconds.items():
            if kind == "cold":
                with open(file, "rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            NgramTable.open(file)
            found.append(time.perf_counter() - began)
    return {kind: statistics.median(found) for kind, found in seconds.items()}


@torch.inference_mode()
def drafting(
    table: NgramTable, ids: Sequence[int], B: int, how: How, sampling: Sampling, repeats: int
) -> list[float]:
    """Microseconds per drafted token: lower quartile, median, upper quartile."""
    drafter = NgramDrafter(table, table.about.num_tokens, how)
    found = []
    for repeat, context in enumerate(_contexts(table, ids, B, sampling, repeats + 5)):
        state = drafter.start(context)
        rng = context.rng
        began = time.perf_counter()
        drafter.propose(state, context, Budget(GAMMA), rng)
        if repeat >= 5:
            found.append(1e6 * (time.perf_counter() - began) / (B * GAMMA))
    return statistics.quantiles(found, n=4)


@torch.inference_mode()
def split(table: NgramTable, ids: Sequence[int], repeats: int) -> dict[str, float]:
    """Median microseconds per token of each part of a sampled draft of one row."""
    q_BV = torch.zeros(1, table.about.num_tokens)
    found: dict[str, list[float]] = {
        "random numbers": [],
        "distribution": [],
        "warping": [],
        "drawing": [],
    }

    def charge(name: str, began: float, tokens: int = 1) -> None:
        found[name].append(1e6 * (time.perf_counter() - began) / tokens)

    for context in _contexts(table, ids, 1, WARPED, repeats):
        nodes = table.nodes(context.tokens_BT[0, : context.lengths[0]].tolist())
        began = time.perf_counter()
        u_BD = context.rng.uniform(Role.DRAFT, GAMMA)
        charge("random numbers", began, GAMMA)
        began = time.perf_counter()
        table.distribution(nodes, q_BV[0].numpy())
        charge("distribution", began)
        began = time.perf_counter()
        p_BV = context.distribution(q_BV.log()[:, None], Prefix.of_chain(context, []))[:, 0]
        charge("warping", began)
        began = time.perf_counter()
        draw(p_BV, u_BD[:, 0])
        charge("drawing", began)
    return {name: statistics.median(times) for name, times in found.items()}


def _contexts(
    table: NgramTable, ids: Sequence[int], B: int, sampling: Sampling, num: int
) -> Iterator[Context]:
    """Batches of contexts from random positions of a text."""
    distributions = Warp([sampling] * B, table.about.num_tokens)
    generator = np.random.default_rng(0)
    for _ in range(num):
        starts = generator.integers(0, len(ids) - 256, B)
        prompts = [list(ids[start : start + 256]) for start in starts]
        yield Context.start(prompts, distributions, [0] * B, range(B))


def continuations(
    target: HFModel, temperature: float, num_texts: int
) -> list[tuple[list[int], int]]:
    """Held-out beginnings continued by the target, with the length of each beginning."""
    prompts = [text[:400] for text in islice((t for t in corpus(True) if len(t) > 800), num_texts)]
    engine = outrider.Engine(target, None, outrider.METHODS["plain"], max_batch_size=8)
    sampling = Sampling(temperature=temperature, max_new_tokens=_NEW_TOKENS)
    results = engine.generate(prompts, sampling)
    return [([*r.prompt_ids, *r.token_ids], len(r.prompt_ids)) for r in results]


@torch.inference_mode()
def acceptance(
    target: HFModel, table: NgramTable, texts: list[tuple[list[int], int]]
) -> dict[str, float]:
    """Means over the continuations: agreement of argmaxes, Σ min(p, q), p(argmax q)."""
    agree, overlap, sure = [], [], []
    for ids, first in texts:
        p_TV = target.module(input_ids=torch.tensor([ids])).logits[0].float().softmax(-1)
        for t in range(first, len(ids)):
            nodes = table.nodes(ids[:t])
            p_V: Tensor = p_TV[t - 1]
            best = table.best(nodes)
            q_V = torch.from_numpy(table.distribution(nodes)).float()
            agree.append(float(best == int(p_V.argmax())))
            overlap.append(float(torch.minimum(p_V, q_V).sum()))
            sure.append(float(p_V[best]))
    columns = {"agree": agree, "overlap": overlap, "sure": sure}
    return {name: statistics.fmean(values) for name, values in columns.items()}


def alphas(files: Sequence[Path], order: int, num_texts: int) -> list[list[dict[str, Any]]]:
    """One row per table and order."""
    target = outrider.load("embedded", method="plain").target
    texts = {T: continuations(target, T, num_texts) for T in (0.0, 1.0)}
    found = []
    for file in files:
        rows = []
        for n in range(1, order + 1):
            table = NgramTable.open(file, n)
            at = {T: acceptance(target, table, texts[T]) for T in texts}
            rows.append(
                {
                    "order": n,
                    "T=0": at[0.0]["agree"],
                    "T=1 sample": at[1.0]["overlap"],
                    "T=1 argmax": at[1.0]["sure"],
                    "leviathan": LEVIATHAN.get(n, ""),
                }
            )
        found.append(rows)
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, tables = report["about"], report["tables"]
    title = f"{about['order']}-gram drafts from {about['tokens'] / 1e6:.0f} million tokens"
    settings = f"corpus: the Python source installed here{about['note']}."
    lines = page.header(title, about, settings)
    heads = (
        "vocabulary|grams seen|tokens, millions|grams by order, millions|file, MB|building, s|"
        "peak memory, GB|opening, s: cached, uncached"
    )
    lines += page.table(heads.split("|"), map(_table_row, tables), left=2)
    heads = f"vocabulary|drafting, γ = {GAMMA}|rows|µs per drafted token, median (quartiles)"
    lines += page.table(heads.split("|"), map(_drafting_row, report["drafting"]), left=2)
    names = list(report["split"][0]["microseconds"])
    split_rows = [
        (f"{row['vocabulary']:,}", *(f"{row['microseconds'][name]:.1f}" for name in names))
        for row in report["split"]
    ]
    lines += page.table(("vocabulary", *(f"{name}, µs" for name in names)), split_rows, left=0)
    lines += [
        "",
        f"α on {about['texts']} outputs, up to {_NEW_TOKENS} tokens each, of the embedded target:",
    ]
    heads = "order|grams seen|T=0|T=1, sampled|T=1, argmax|Leviathan et al., Table 3"
    shares = ("T=0", "T=1 sample", "T=1 argmax")
    alpha_rows = [
        (row["order"], _seen(table), *(f"{row[key]:.3f}" for key in shares), row["leviathan"])
        for table in tables
        for row in table.get("alpha", ())
    ]
    lines += page.table(heads.split("|"), alpha_rows, left=2)
    found = [
        (f"{name}: at most {BARS[name]:g}", f"{value:.2f}", value <= BARS[name])
        for name, value in bars(report).items()
    ]
    return "\n".join(lines + page.bars_table(found)) + "\n"


def _table_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['vocabulary']:,}",
        _seen(row),
        f"{row['tokens'] / 1e6:.1f}",
        ", ".join(f"{count / 1e6:.2f}" for count in row["grams"]),
        f"{row['bytes'] / 1e6:.0f}",
        f"{row['seconds']:.0f}",
        f"{row['peak_gb']:.1f}",
        f"{row['opening']['warm']:.2f}, {row['opening']['cold']:.2f}",
    )


def _drafting_row(row: dict[str, Any]) -> tuple[str, ...]:
    low, middle, high = row["microseconds"]
    times = f"{middle:.1f} ({low:.1f} to {high:.1f})"
    return f"{row['vocabulary']:,}", row["draw"], row["rows"], times


def bars(report: dict[str, Any]) -> dict[str, float]:
    """The worst measured value of each bar over all tables; drafting with one row."""
    tables = report["tables"]
    argmax = [row for row in report["drafting"] if row["draw"] == "argmax" and row["rows"] == 1]
    values = (
        max(table["bytes"] / 1e6 for table in tables),
        max(table["opening"]["cold"] for table in tables),
        max(row["microseconds"][1] for row in argmax),
    )
    return dict(zip(BARS, values, strict=True))


def _seen(table: dict[str, Any]) -> str:
    return "all" if table["min_count"] == 1 else f"{table['min_count']} times or more"


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--order", type=int, default=4)
    parser.add_argument("--large-vocabulary", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--note", default="", help="added to the page after the hardware")
    parser.add_argument("--work", type=Path, default=Path("runs/ngram"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    sizes = ((EMBEDDED, 1), (EMBEDDED, 2), (options.large_vocabulary, 1))
    built = [build(options.work, options.tokens, V, options.order, least) for V, least in sizes]
    ours = [file for file, numbers in built if numbers["vocabulary"] == EMBEDDED]
    drafted, parts = [], []
    for file, numbers in built:
        numbers["opening"] = opening(file)
        if numbers["min_count"] > 1:
            continue
        tokenizer = tokenizer_of(options.work, numbers["vocabulary"])
        texts = encoded(tokenizer, islice(corpus(held_out=True), _HELD_OUT_FILES))
        ids = [token for text in texts for token in text]
        table, about = NgramTable.open(file), {"vocabulary": numbers["vocabulary"]}
        for (name, draws), B in product(DRAWS.items(), (1, 16)):
            microseconds = drafting(table, ids, B, *draws, options.repeats)
            drafted.append(about | {"draw": name, "rows": B, "microseconds": microseconds})
        parts.append(about | {"microseconds": split(table, ids, options.repeats)})
    for (_, numbers), rows in zip(built, alphas(ours, options.order, options.texts), strict=False):
        numbers["alpha"] = rows
    report = {
        "about": page.about(
            f"python -m benchmarks.ngram --tokens {options.tokens} --order {options.order} "
            f"--threads {options.threads}",
            order=options.order,
            tokens=options.tokens,
            texts=options.texts,
            note=f", {options.note}" if options.note else "",
        ),
        "tables": [numbers for _, numbers in built],
        "drafting": drafted,
        "split": parts,
    }
    page.publish(options.out, "ngram", report, markdown(report))


if __name__ == "__main__":
    main()
