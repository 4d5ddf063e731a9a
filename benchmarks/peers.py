"""Outrider against other engines: the same pair, weights and precision, one run, interleaved.

    python -m benchmarks.peers --pair embedded
    python -m benchmarks.peers --pair embedded --dtype bfloat16
    python -m benchmarks.peers --pair 1B-cost
    python -m benchmarks.peers --pair smollm2 --dtype bfloat16 --temperature 0.8
        [--prompt-files runs/smollm2/prompts/*.jsonl]

Every peer runs in its own process, and in its own environment if it needs one (docs/peers.md). All
get the same prompts as token ids, the same number of new tokens, precision, γ and threads, with
temperature and batch 1. SmolLM2-135M-Instruct has the draft model that comes with the package,
which all peers read, and a head, which only Outrider reads. ``--prompt-files`` has chat prompts,
such as ``published_prompts.py`` writes. Rows whose names end in a precision run in that one; with a
format of blocks, such as q8_0, Outrider and llama.cpp read the same GGUF file. Each repeat runs
every row once, in an order that rotates. Peers that are not installed are listed with the reason.
Writes its section of ``benchmarks/results/peers.json`` and the whole of ``peers.md``.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import copy_prompts
from benchmarks.peer_workers.client import Client, PeerError
from benchmarks.peer_workers.compare import (
    GROUPS,
    OPENVINO_OR_LLAMA_CPP,
    OURS_EQUAL,
    Series,
    reference,
    summary,
    verdicts,
)
from benchmarks.peer_workers.page import markdown
from benchmarks.peer_workers.pairs import PAIRS
from benchmarks.peer_workers.protocol import BLOCKS, Job
from benchmarks.peer_workers.registry import PEERS, Environments, float_rows, once, parse_rows
from benchmarks.vs_transformers import PROMPTS
from outrider.lab.metadata import hardware, instructions
from outrider.runtime.hf.load import load_tokenizer

WARMUP_TOKENS = 16  # of each of two prompts
Item = TypeVar("Item")


@dataclass(frozen=True)
class Plan:
    """The default settings of a pair's measurement.

    Attributes:
        rows: in the form that ``parse_rows`` accepts.
        prompts: number of prompts.
        prompt_tokens: length to which longer prompts are cut.
        max_new_tokens: per prompt.
        repeats: runs over all prompts.
        one_at_a_time: whether only one peer is in memory, and loaded again in every repeat.
    """

    rows: tuple[str, ...]
    prompts: int
    prompt_tokens: int
    max_new_tokens: int
    repeats: int
    one_at_a_time: bool


BLOCK_ROWS = tuple(
    f"{peer}:plain {kind}{more}"
    for kind in BLOCKS
    for peer, more in (("outrider", " compiled"), ("outrider", "+a8 compiled"), ("llama.cpp", ""))
)
PLANS = {
    "embedded": Plan(float_rows(), 9, 48, 64, 5, one_at_a_time=False),
    "smollm2": Plan(
        (
            "outrider:plain compiled",
            *GROUPS[OURS_EQUAL],
            "transformers:plain",
            "transformers:assisted",
            *GROUPS[OPENVINO_OR_LLAMA_CPP],
            *(row for row in BLOCK_ROWS if row not in GROUPS[OPENVINO_OR_LLAMA_CPP]),
        ),
        4,
        64,
        128,
        5,
        one_at_a_time=True,
    ),
    "1B-cost": Plan(
        (
            "outrider:plain compiled",
            "outrider:speculative compiled",
            "transformers:assisted",
            "llama.cpp:speculative",
            "openvino:speculative",
            "vllm:speculative",
        ),
        2,
        16,
        40,
        3,
        one_at_a_time=True,
    ),
}


class Run:
    """The workers of a run and their answers."""

    def __init__(
        self,
        rows: Sequence[tuple[str, str]],
        environments: Environments,
        job: Job,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
    ) -> None:
        self.rows = list(rows)
        self.environments, self.job = environments, job
        self.prompts, self.num_tokens = prompts, num_tokens
        self.series = {key: Series(":".join(key)) for key in self.rows}

    def all_in_memory(self, repeats: int) -> Iterator[int]:
        """Keeps all workers running and alternates rows; yields the number of repeats done."""
        with ExitStack() as stack:
            clients = {peer: self._start(peer, stack) for peer in dict(self.rows)}
            for key in self.rows:
                self._prepare(key, clients[key[0]])
            for repeat in range(repeats):
                for key in rotated(self.rows, repeat):
                    self._measure(key, clients[key[0]])
                yield repeat + 1

    def one_at_a_time(self, repeats: int) -> Iterator[int]:
        """Runs one worker at a time with all its rows; yields the number of repeats done."""
        for repeat in range(repeats):
            for peer in rotated(list(dict(self.rows)), repeat):
                with ExitStack() as stack:
                    client = self._start(peer, stack)
                    own = rotated([key for key in self.rows if key[0] == peer], repeat)
                    for key in own:
                        self._prepare(key, client)
                    for key in own:
                        self._measure(key, client)
            yield repeat + 1

    def report(self, pair: str, about: dict[str, Any]) -> dict[str, Any]:
        """The report of all measurements so far."""
        series = {one.name: one for one in self.series.values()}
        model = None if self.job.temperature else reference(series)
        rows = {name: summary(one, model) for name, one in series.items()}
        return {"about": about, "rows": rows, "bars": verdicts(pair, rows, self.job.temperature)}

    def _start(self, peer: str, stack: ExitStack) -> Client | None:
        log = Path(self.job.exports) / f"{peer}.log"
        try:
            return stack.enter_context(self.environments.start(PEERS[peer], log))
        except FileNotFoundError as error:
            for key in self.rows:
                if key[0] == peer:
                    self.series[key].error = f"not installed: {error}"
            return None

    def _prepare(self, key: tuple[str, str], client: Client | None) -> None:
        """Loads the row and warms it up with the shortest and the longest prompt."""
        series = self.series[key]
        if client is None or series.error:
            return
        try:
            ready = client.prepare(key[1], self.job)
            began = time.perf_counter()
            for prompt in (min(self.prompts, key=len), max(self.prompts, key=len)):
                client.generate(key[1], prompt, min(WARMUP_TOKENS, self.num_tokens))
            if series.ready is None:  # from the first load, before anything is cached
                series.ready, series.warmup_seconds = ready, time.perf_counter() - began
        except PeerError as error:
            series.error = str(error)
        say(f"{series.name}: {series.error or 'ready'}")

    def _measure(self, key: tuple[str, str], client: Client | None) -> None:
        series = self.series[key]
        if client is None or series.error:
            return
        try:
            series.passes.append(
                [client.generate(key[1], prompt, self.num_tokens) for prompt in self.prompts]
            )
            say(f"{series.name}: {series.speeds[-1]:.1f} tokens/s")
        except PeerError as error:
            series.error = str(error)


def rotated(items: list[Item], by: int) -> list[Item]:
    """The items, rotated to the left by ``by``."""
    by %= max(len(items), 1)
    return items[by:] + items[:by]


def say(text: str) -> None:
    """Prints a line of progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def texts(num: int) -> list[str]:
    """Short beginnings of code, files and docstrings, alternating."""
    kinds = [list(PROMPTS[:num])]
    kinds += [[one.text for one in copy_prompts.prompts(kind, num)] for kind in ("code", "free")]
    return list(chain.from_iterable(zip(*kinds, strict=False)))[:num]


def chats(files: Sequence[Path], num: int, tokenizer: Any) -> list[list[int]]:
    """The first prompts of files of JSON lines, {"messages": [...]} each, ``num`` from all files
    together, as token ids under the chat template."""
    kinds = [
        [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    ]
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in list(chain.from_iterable(zip(*kinds, strict=False)))[:num]
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pair", choices=sorted(PAIRS), default="embedded")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument(
        "--rows", nargs="+", help="peer or peer:row; default: those of the pair's plan"
    )
    options.add_argument("--prompts", type=int)
    options.add_argument("--prompt-files", type=Path, nargs="+", help="JSON lines of chat prompts")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--prompt-tokens", type=int, help="longer prompts are cut")
    options.add_argument("--max-new-tokens", type=int)
    options.add_argument("--repeats", type=int)
    options.add_argument("--gamma", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--one-at-a-time", action=argparse.BooleanOptionalAction, default=None)
    options.add_argument(
        "--peers", type=Path, default=Path("runs/peers"), help="folder of the peers' environments"
    )
    options.add_argument("--python-for", nargs="+", default=[], metavar="PEER=PATH")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return options


def main() -> None:
    """Parses the options, measures, writes the report and prints the table."""
    command_line = parser()
    options = command_line.parse_args()
    for name, value in vars(PLANS[options.pair]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        rows = once(parse_rows(options.rows), options.dtype)
    except ValueError as error:
        command_line.error(str(error))
    named = dict(text.split("=", 1) for text in options.python_for)
    exports = (options.peers / "exports").resolve()
    pair = PAIRS[options.pair](exports)
    tokenizer: Any = load_tokenizer(pair.target)
    if options.prompt_files:
        prompts = chats(options.prompt_files, options.prompts, tokenizer)
        options.prompt_tokens = max(map(len, prompts))
    else:
        made = map(tokenizer.encode, texts(options.prompts))
        prompts = [ids[: options.prompt_tokens] for ids in made]
    job = Job(
        target=str(pair.target),
        draft=str(pair.draft),
        num_speculative_tokens=options.gamma,
        threads=options.threads,
        max_length=128 * -(-(max(map(len, prompts)) + options.max_new_tokens + 16) // 128),
        exports=str(exports),
        dtype=options.dtype,
        temperature=options.temperature,
        head=pair.head,
    )
    environments = Environments(options.peers, named)
    run = Run(rows, environments, job, prompts, options.max_new_tokens)
    about = {
        "date": date.today().isoformat(),
        "hardware": f"{hardware()} ({', '.join(instructions())})",
        "pair": pair.name,
        "dtype": options.dtype,
        "temperature": options.temperature,
        "chats": bool(options.prompt_files),
        "parameters": pair.parameters,
        "num_speculative_tokens": options.gamma,
        "threads": options.threads,
        "prompts": len(prompts),
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "one_at_a_time": options.one_at_a_time,
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
    }
    measure = run.one_at_a_time if options.one_at_a_time else run.all_in_memory
    page = ""
    for repeats in measure(options.repeats):  # written each time, so that a killed run loses little
        report = run.report(pair.name, about | {"repeats": repeats})
        key = section(pair.name, options.dtype, options.temperature, bool(options.prompt_files))
        page = written(options.out, key, report)
    print(page)


def section(pair: str, dtype: str, temperature: float = 0.0, chats: bool = False) -> str:
    """The key of a pair in a precision, over chat prompts or not, and at a temperature, in the
    report."""
    words = [pair] + [dtype] * (dtype != "float32") + ["chats"] * chats
    return ", ".join([*words, *[f"temperature {temperature:g}"] * (temperature > 0)])


def written(out: Path, pair: str, report: dict[str, Any]) -> str:
    """Adds a section to the report file, writes the page, and returns it."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "peers.json"
    whole = json.loads(file.read_text()) if file.exists() else {"pairs": {}}
    whole["pairs"][pair] = report
    file.write_text(json.dumps(whole, indent=1) + "\n")
    page = markdown(whole)
    (out / "peers.md").write_text(page)
    return page


if __name__ == "__main__":
    main()
