"""A target that can chat, in a folder, and distillations of it that take a second."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_models import byte_tokenizer, tiny_module
from transformers import PreTrainedTokenizerBase

from outrider.runtime import HFModel
from outrider.train.distill.run import distil
from outrider.train.distill.settings import Data, Distillation, Measuring, Start
from outrider.train.loop import Settings
from outrider.train.optim import Schedule

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
LINES = [f"def f{i}(x):" for i in range(24)]


def tokenizer(chat: bool = True) -> PreTrainedTokenizerBase:
    words = byte_tokenizer()
    if chat:
        words.chat_template = TEMPLATE
    return words


def target(chat: bool = True, **settings: Any) -> HFModel:
    """Three layers, whose end token is not rare."""
    words = tokenizer(chat)
    settings = {"num_hidden_layers": 3, "std": 0.2} | settings
    module = tiny_module(vocab_size=len(words), eos_token_id=0, bos_token_id=0, **settings)
    return HFModel(module, words, "target")


def save_target(folder: Path, chat: bool = True) -> Path:
    made = target(chat)
    made.module.save_pretrained(folder)
    tokenizer(chat).save_pretrained(folder)
    return folder


def prompts_file(folder: Path, lines: list[str] = LINES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def distillation(
    folder: Path, source: str | Path | HFModel, prompts: Path, **changes: Any
) -> Distillation:
    """Eight steps of two rows in `folder`."""
    settings = Settings(
        Schedule(changes.pop("learning_rate", 1e-2), 8, 1, 2),
        checkpoint_every=changes.pop("checkpoint_every", 2),
        validate_every=4,
        dtype=changes.pop("train_dtype", torch.float32),
    )
    data = {
        "prompts": prompts,
        "answer_tokens": 10,
        "refresh_every": 3,
        "refresh_prompts": 6,
        "replay_samples": 16,
    } | changes.pop("data", {})
    run: dict[str, Any] = {
        "start": Start(layers=(0, 2)),
        "top_k": 8,
        "rows": 2,
        "length": 48,
        "batch_size": 8,
        "measuring": Measuring((0.0, 1.0), prompts=3, tokens=8),
        "device": "cpu",
        "dtype": "float32",
    } | changes
    return Distillation(target=source, out=folder, data=Data(**data), settings=settings, **run)


def quiet() -> Console:
    return Console(quiet=True)


def distil_mixture(folder: Path, source: Path, prompts: Path, cache: Path) -> None:
    """A run on the target's and the draft's samples, as a process of its own runs it."""
    torch.set_num_threads(1)
    data = {"kind": "mixture", "shares": {"target": 0.5, "replay": 0.5}}
    distil(distillation(folder, source, prompts, cache=cache, data=data), quiet())
