"""Conversations that a chat target has with itself, as training data for heads and drafts.

    python -m recipes.self_chat --target runs/smollm2/model --out runs/smollm2/self_chat

The target writes the user's messages: it continues a user turn, which is empty or has a few words,
under one of several system prompts (Magpie, Xu et al. 2024, https://arxiv.org/abs/2406.08464). Then
it answers them, at one of several temperatures each. Its answers also serve as articles that it is
asked to summarise, so that some prompts are long; ``--texts FILE ...`` adds passages of plain-text
files as articles. ``--prompts FILE`` mixes in messages from a file of JSON lines,
{"prompt": "..."} each.

The conversations of a chunk depend on its number and the seed, and are written once the chunk is
complete: an interrupted run goes on with the next chunk. ``answers.jsonl`` joins all chunks; it has
one {"messages": [...], "temperature": ..., "num_tokens": ...} per line, as ``outrider train-head``
and ``outrider distill`` read it.

On two cores SmolLM2-135M writes about a million tokens in an hour and a half.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import outrider
from outrider import Sampling
from outrider.engine import Engine
from outrider.lab.whole_file import write_whole

Conversation = list[dict[str, str]]

ATTEMPTS = 128
"""Messages that the target begins in a chunk."""
FROM_FILE = 32
"""Messages of the file in a chunk."""
ARTICLES = 12
"""Summaries asked for in a chunk."""
PASSAGES = 32
"""Summaries of the texts' passages in a chunk."""
PASSAGE_WORDS = 120, 600
ROWS = 48
MESSAGE_TOKENS = 160
ANSWER_TOKENS = 256
TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 1.0, 1.0)

PLAIN, HELPFUL, MATHS, PYTHON, SUMMARY = (
    "",
    "You are a helpful assistant.",
    "You are an expert in mathematics. Solve problems step by step.",
    "You are an expert Python programmer.",
    "You summarize articles for busy readers.",
)
NAMES = ("Tom", "Anna", "A farmer", "Maria", "James", "A store", "Lena", "Ben", "A train", "Emily")
OPENINGS = {
    PLAIN: ("", "", "", "", "Write ", "Explain ", "What ", "How ", "Imagine ", "Describe ", "Why "),
    HELPFUL: ("", "", "Write ", "Compose ", "Give me ", "Can you ", "Suppose "),
    MATHS: ("", "If ", *(f"{name} has " for name in NAMES), *(f"{name} buys " for name in NAMES)),
    PYTHON: (
        "",
        "Write a Python function that ",
        "Write a Python function that takes a list ",
        "Complete this function.\n\ndef ",
        "from typing import List\n\n\ndef ",
        "def ",
    ),
}
WEIGHTS = {PLAIN: 8, HELPFUL: 3, MATHS: 5, PYTHON: 4}
SUMMARISE = (
    "Summarize: ",
    "Summarize the following article:\n\n",
    "Give a summary of this text.\n\n",
)


@dataclass(frozen=True)
class Asked:
    """A user's message with the system prompt it comes under; an empty one is the template's."""

    system: str
    message: str

    @property
    def conversation(self) -> Conversation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.message}]


def user_turn(engine: Engine, system: str, opening: str) -> str:
    """The template's text up to a user's message, and the opening of that message."""
    tokenizer: Any = engine.target.tokenizer
    text = tokenizer.apply_chat_template(Asked(system, "\0").conversation, tokenize=False)
    return str(text).partition("\0")[0] + opening


def written(engine: Engine, choose: random.Random, seed: int) -> list[Asked]:
    """Messages that the target writes itself; those it does not finish are dropped."""
    tokenizer: Any = engine.target.tokenizer
    systems = choose.choices(list(WEIGHTS), list(WEIGHTS.values()), k=ATTEMPTS)
    openings = [choose.choice(OPENINGS[system]) for system in systems]
    turns = [
        tokenizer(user_turn(engine, system, opening), add_special_tokens=False).input_ids
        for system, opening in zip(systems, openings, strict=True)
    ]
    sampling = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=MESSAGE_TOKENS, seed=seed)
    results = engine.generate(turns, sampling)
    return [
        Asked(system, (opening + result.text).strip())
        for system, opening, result in zip(systems, openings, results, strict=True)
        if result.finish_reason != "length" and len(result.text.strip()) > 8
    ]


def summaries(answers: Sequence[str], choose: random.Random) -> Iterator[Asked]:
    """Requests to summarise some of the target's earlier answers."""
    articles = [answer for answer in answers if len(answer) > 600]
    for _ in range(min(ARTICLES, len(articles))):
        text = "\n\n".join(choose.sample(articles, min(choose.randint(1, 3), len(articles))))
        yield Asked(choose.choice((PLAIN, PLAIN, SUMMARY)), choose.choice(SUMMARISE) + text)


def passages(texts: Sequence[str], choose: random.Random) -> Iterator[Asked]:
    """Requests to summarise passages of texts: whole lines, from a random line on."""
    for _ in range(PASSAGES if texts else 0):
        text = choose.choice(texts)
        begin = text.index("\n", choose.randrange(len(text) - len(text) // 8)) + 1
        words, wanted = 0, choose.randint(*PASSAGE_WORDS)
        lines = []
        for line in text[begin : begin + 20 * wanted].splitlines():
            lines.append(line)
            words += len(line.split())
            if words >= wanted:
                break
        passage = "\n".join(lines).strip()
        yield Asked(choose.choice((PLAIN, PLAIN, SUMMARY)), choose.choice(SUMMARISE) + passage)


def answered(engine: Engine, asked: Sequence[Asked], choose: random.Random, seed: int) -> list[Any]:
    """The target's answers, as lines of the file."""
    temperatures = [choose.choice(TEMPERATURES) for _ in asked]
    results = engine.generate(
        [each.conversation for each in asked],
        [
            Sampling(temperature=temperature, max_new_tokens=ANSWER_TOKENS, seed=seed)
            for temperature in temperatures
        ],
    )
    return [
        {
            "messages": [*each.conversation, {"role": "assistant", "content": result.text}],
            "temperature": temperature,
            "finished": result.finish_reason != "length",
            "num_tokens": len(result.token_ids),
        }
        for each, temperature, result in zip(asked, temperatures, results, strict=True)
        if result.text.strip()
    ]


def make_chunk(
    engine: Engine,
    number: int,
    before: Sequence[Any],
    prompts: Sequence[str],
    texts: Sequence[str],
    seed: int,
) -> list[Any]:
    """The conversations of a chunk.

    Args:
        engine: decodes the target.
        number: of the chunk.
        before: the conversations of the chunk before it.
        prompts: messages from a file.
        texts: of which passages are summarised.
        seed: of the whole run.
    """
    choose = random.Random(f"{seed}:{number}")
    asked = [Asked(PLAIN, choose.choice(prompts)) for _ in range(FROM_FILE if prompts else 0)]
    asked += written(engine, choose, seed + 2 * number)
    # Long prompts go apart: attention computes as many slots for each row as the longest row has.
    longer = [
        *summaries([line["messages"][-1]["content"] for line in before], choose),
        *passages(texts, choose),
    ]
    return [
        line
        for group in (asked, longer)
        for line in answered(engine, list(dict.fromkeys(group)), choose, seed + 2 * number + 1)
    ]


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, lines: Sequence[Any]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def converse(
    target: str,
    out: Path,
    tokens: int,
    prompts: Sequence[str],
    texts: Sequence[str],
    seed: int,
    console: Console,
) -> Path:
    """Makes chunks until the answers have the tokens asked for; returns the file of all chunks."""
    out.mkdir(parents=True, exist_ok=True)
    engine = outrider.load(
        target, method="plain", dtype="bfloat16", max_batch_size=ROWS, compile="auto"
    )
    begin = time.monotonic()
    number, made, here = 0, 0, 0
    before: list[Any] = []
    chunks = []
    while made < tokens:
        path = out / f"chunk-{number:05d}.jsonl"
        if not path.exists():
            write(path, make_chunk(engine, number, before, prompts, texts, seed))
            here += sum(line["num_tokens"] for line in read(path))
        before = read(path)
        chunks += before
        made += sum(line["num_tokens"] for line in before)
        rate = here / (time.monotonic() - begin)
        console.print(f"chunk {number}: {made:,} tokens, {rate:.0f} per second", highlight=False)
        number += 1
    write(out / "answers.jsonl", chunks)
    return out / "answers.jsonl"


def training_parser(description: str, steps: int) -> argparse.ArgumentParser:
    """The options of recipes that train on such conversations, with the default number of steps."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", default="runs/smollm2/model", help="folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", type=Path, help="conversations; default: made by the target")
    parser.add_argument("--prompts", type=Path, help='JSON lines {"prompt": ...} to mix in')
    parser.add_argument("--tokens", type=int, default=300_000, help="of the target's answers")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(texts=[])
    return parser


def training_data(given: argparse.Namespace, console: Console) -> Path:
    """The conversations that the options name, or those that the target makes."""
    if given.data is not None:
        return Path(given.data)
    prompts = [line["prompt"] for line in read(given.prompts)] if given.prompts else []
    texts = [file.read_text(encoding="utf-8") for file in given.texts]
    folder = given.out / "conversations"
    return converse(given.target, folder, given.tokens, prompts, texts, given.seed, console)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let a chat target converse with itself.")
    parser.add_argument("--target", required=True, help="folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the conversations")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the answers, in all")
    parser.add_argument("--prompts", type=Path, help='JSON lines: {"prompt": "..."}')
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="plain text to summarise")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    prompts = [line["prompt"] for line in read(given.prompts)] if given.prompts else []
    texts = [file.read_text(encoding="utf-8") for file in given.texts]
    console = Console(stderr=True)
    converse(given.target, given.out, given.tokens, prompts, texts, given.seed, console)


if __name__ == "__main__":
    main()
