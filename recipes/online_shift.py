"""Measures online adaptation on a stream of requests that turns to another domain.

    python -m recipes.online_shift --out DIR
    python -m recipes.online_shift --out DIR --target T --draft D --before a.txt --after b.txt

The same requests pass through three engines, in bursts: first prompts of one text, then of another.

    frozen    the draft model as it is
    online    adapted; what a burst leaves to learn is learned in the pause before the next one
    oracle    the draft model distilled beforehand on other prompts of the second text, by the same
              trainer, over several passes

The texts are by default Python source of the standard library, on which the embedded pair was
trained, and the log of a service. Writes DIR/table.json and
DIR/alpha.png: α by burst, the share of the gap between frozen and oracle that online closes, and
after how many tokens it has closed half of it. Then the throughput of a frozen engine is compared
with that of one whose trainer runs in a process of its own, on the same requests in alternation.

Each burst is recorded when it is done, so an interrupted run goes on where it stopped; the online
arm goes on from its folder of versions, without the samples that it would have replayed. Sizes are
in this file: ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider import Engine, Sampling, load
from outrider.lab import plots
from outrider.train.online import AdaptSettings

SEED = 17
PROMPT_TOKENS = 48
NEW_TOKENS = 48
BURST = 8
"""Requests that run together."""
BURSTS_BEFORE, BURSTS_AFTER = 4, 16
ORACLE_BURSTS, ORACLE_PASSES = 20, 1
THROUGHPUT_BURSTS = 6
SMOOTHING = 3
"""Bursts over which the last α of each arm is averaged."""
ARMS = ("frozen", "online", "oracle")
SETTINGS = AdaptSettings(
    where="idle", learning_rate=3e-4, batch_size=8, replay=0.75, publish_every=4, trial_rounds=24
)


def default_texts() -> tuple[str, str]:
    """Python source of the standard library, and lines of a log that a seed determines."""
    import argparse as first
    import inspect as second
    import tarfile as third

    sources = [Path(str(module.__file__)).read_text() for module in (first, second, third)]
    return "\n".join(sources), "\n".join(log_lines(4000))


def log_lines(num: int) -> list[str]:
    """Lines such as a service writes."""
    rng = random.Random(SEED)

    def line() -> str:
        day = f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}"
        part = f"{rng.choice('worker scheduler gateway storage'.split())}-{rng.randint(1, 9)}"
        what = rng.choice("request connection transaction upload".split())
        end = rng.choice(("completed", "failed", "timed out", "was retried"))
        level = rng.choice("INFO WARN ERROR DEBUG".split())
        number, after = rng.randint(1000, 9999), rng.randint(1, 900)
        return f"{day} {time} {level} [{part}] {what} {number} {end} after {after} ms"

    return [line() for _ in range(num)]


def prompts_of(engine: Engine, text: str, num: int, seed: int) -> list[list[int]]:
    """Windows of a text, as token ids.

    Raises:
        SystemExit: the text is shorter than a window.
    """
    tokenizer: Any = engine.target.tokenizer
    ids = tokenizer(text, verbose=False)["input_ids"]  # longer than a context
    if len(ids) <= PROMPT_TOKENS:
        raise SystemExit(f"a text has {len(ids)} tokens; it needs more than {PROMPT_TOKENS}")
    rng = random.Random(seed)
    starts = [rng.randrange(len(ids) - PROMPT_TOKENS) for _ in range(num)]
    return [list(ids[start : start + PROMPT_TOKENS]) for start in starts]


def bursts_of(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    return [list(prompts[i : i + BURST]) for i in range(0, len(prompts), BURST)]


def sampling() -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=SEED)


def run_arm(
    engine: Engine, arm: str, bursts: Sequence[list[list[int]]], out: Path
) -> list[dict[str, float]]:
    """α and emitted tokens of each burst."""
    record = out / f"{arm}.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    done = [json.loads(line) for line in lines]
    if len(done) == len(bursts):
        return done
    adaptation = engine.adapt(out / "adaptation", SETTINGS) if arm == "online" else None
    with record.open("a") as file:
        for index, prompts in enumerate(bursts):
            if index < len(done):
                continue
            stats = engine.generate(prompts, sampling()).stats
            entry = {
                "alpha": stats.alpha,
                "length": stats.acceptance_length,
                "tokens": float(stats.emitted),
            }
            if adaptation is not None:
                adaptation.flush()
                entry["version"] = float(adaptation.state.version)
                entry["step"] = float(adaptation.state.step)
            file.write(json.dumps(entry) + "\n")
            file.flush()
            done.append(entry)
            print(f"{arm} {index + 1}/{len(bursts)}: α {entry['alpha']:.3f}", flush=True)
    if adaptation is not None:
        adaptation.stop()
    return done


def distil_oracle(engine: Engine, prompts: Sequence[list[int]], out: Path) -> Path:
    """The draft model distilled for the second text, as a folder."""
    folder = out / "oracle"
    if (folder / "config.json").exists():
        return folder
    settings = replace(SETTINGS, trial_rounds=0)
    with engine.adapt(out / "oracle-adaptation", settings) as adaptation:
        for number in range(ORACLE_PASSES):
            for prompts_ in bursts_of(prompts):
                engine.generate(prompts_, replace(sampling(), seed=number + 1))
                adaptation.flush()
            state = adaptation.state
            print(
                f"oracle, pass {number + 1}: step {state.step}, loss {state.loss:.3f}", flush=True
            )
        adaptation.save(folder)
    return folder


def summary(arms: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What the table says: α of each arm before and after, the recovered share of the gap, and the
    tokens of the second text after which half of it was recovered."""

    def mean(arm: str, first: int, last: int) -> float:
        values = [entry["alpha"] for entry in arms[arm][first:last]]
        return sum(values) / len(values)

    num = len(arms["frozen"])
    table: dict[str, Any] = {
        arm: {
            "before": mean(arm, 0, BURSTS_BEFORE),
            "just after": mean(arm, BURSTS_BEFORE, BURSTS_BEFORE + SMOOTHING),
            "at the end": mean(arm, num - 2 * SMOOTHING, num),
            "second text": mean(arm, BURSTS_BEFORE, num),
        }
        for arm in ARMS
    }
    last = {arm: table[arm]["at the end"] for arm in ARMS}
    gap = last["oracle"] - last["frozen"]
    table["gap"] = gap
    table["recovered"] = (last["online"] - last["frozen"]) / gap if gap else None
    tokens, table["tokens to half"] = 0.0, None
    for index in range(BURSTS_BEFORE, num):
        tokens += arms["online"][index]["tokens"]
        first = max(BURSTS_BEFORE, index - SMOOTHING + 1)
        here = {arm: mean(arm, first, index + 1) for arm in ARMS}
        rise, whole = here["online"] - here["frozen"], here["oracle"] - here["frozen"]
        if index - first == SMOOTHING - 1 and whole > 0 and rise >= whole / 2:
            table["tokens to half"] = tokens
            break
    table["tokens"] = sum(entry["tokens"] for entry in arms["online"][BURSTS_BEFORE:])
    return table


def throughput(
    frozen: Engine, online: Engine, bursts: Sequence[list[list[int]]]
) -> dict[str, float]:
    """Tokens per second of both engines, burst by burst in alternation; the second one's trainer
    runs in a process of its own all the while."""
    seconds = {"frozen": 0.0, "online": 0.0}
    emitted = dict.fromkeys(seconds, 0)
    with online.adapt(settings=replace(SETTINGS, where="process")) as adaptation:
        adaptation.flush()  # once it has started
        for prompts in bursts:
            for name, engine in (("frozen", frozen), ("online", online)):
                stats = engine.generate(prompts, sampling()).stats
                seconds[name] += stats.seconds
                emitted[name] += stats.emitted
        steps = adaptation.state.step
    found = {name: emitted[name] / seconds[name] for name in seconds}
    return found | {"ratio": found["online"] / found["frozen"], "steps meanwhile": float(steps)}


def draw(arms: dict[str, list[dict[str, float]]], path: Path) -> None:
    """α over the stream: points are bursts, lines means over a few."""
    plots.require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.0, 4.8))
    styles = {
        "frozen": (plots.GREY, "--"),
        "online": (plots.RED, "-"),
        "oracle": (plots.BLUE, (0, (1.2, 1.2))),
    }
    for arm, (colour, dashes) in styles.items():
        tokens, x = 0.0, []
        for entry in arms[arm]:
            tokens += entry["tokens"]
            x.append(tokens / 1000)
        y = [entry["alpha"] for entry in arms[arm]]
        smooth = []
        for index in range(len(y)):
            first = max(0, index - SMOOTHING + 1)
            if index >= BURSTS_BEFORE:
                first = max(first, BURSTS_BEFORE)
            smooth.append(sum(y[first : index + 1]) / (index + 1 - first))
        axes.plot(x, y, ".", color=colour, alpha=0.35, markersize=5)
        for part in (slice(0, BURSTS_BEFORE), slice(BURSTS_BEFORE, None)):
            label = arm if part.start == 0 else None
            axes.plot(
                x[part], smooth[part], color=colour, linestyle=dashes, linewidth=2, label=label
            )
    shift = sum(entry["tokens"] for entry in arms["frozen"][:BURSTS_BEFORE]) / 1000
    axes.axvline(shift, color="black", linewidth=0.8)
    axes.annotate(
        "the stream turns to the second text",
        (shift, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xlabel("tokens emitted [thousands]")
    axes.set_ylabel("α")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--before", type=Path, help="the first text; default: Python source")
    parser.add_argument("--after", type=Path, help="the second; default: log lines")
    parser.add_argument("--compile", default="off", choices=["off", "auto"])
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    first, second = default_texts()
    if options.before is not None:
        first = options.before.read_text()
    if options.after is not None:
        second = options.after.read_text()

    def engine(draft: str | Path | None = None) -> Engine:
        return load(
            options.target,
            draft or options.draft or ("embedded" if options.target == "embedded" else None),
            num_speculative_tokens=4,
            max_batch_size=BURST,
            compile=options.compile,
        )

    frozen = engine()
    num_after = BURST * BURSTS_AFTER
    split = len(second) // 2
    stream = prompts_of(frozen, first, BURST * BURSTS_BEFORE, SEED)
    stream += prompts_of(frozen, second[:split], num_after, SEED + 1)
    others = prompts_of(frozen, second[split:], BURST * ORACLE_BURSTS, SEED + 2)
    oracle = engine(distil_oracle(engine(), others, out))
    engines = {"frozen": frozen, "online": engine(), "oracle": oracle}
    arms = {arm: run_arm(engines[arm], arm, bursts_of(stream), out) for arm in ARMS}
    table = summary(arms)
    draw(arms, out / "alpha.png")
    table["throughput"] = throughput(
        frozen, engine(), bursts_of(stream)[BURSTS_BEFORE:][:THROUGHPUT_BURSTS]
    )
    (out / "table.json").write_text(json.dumps(table, indent=1, ensure_ascii=False))
    print(json.dumps(table, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
