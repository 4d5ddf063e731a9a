"""A pair of tiny models with random weights, saved in folders like a user's models."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from outrider.cli import app

CONTEXT = 256
LINES = [f"def f{i}(x):\n    return x + {i}  # ¿naïve?\n" for i in range(40)]


def save_model(folder: Path, seed: int, vocab_size: int, layers: int = 2) -> None:
    """A Llama with random weights, large enough that its distributions have clear maxima."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


def save_tokenizer(folder: Path, vocab_size: int = 300) -> int:
    """A byte-level tokenizer trained on a few lines; its number of entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a draft with different weights and the same tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = folder / "target", folder / "draft"
    size = save_tokenizer(target)
    save_model(target, 1, size)
    save_tokenizer(draft)
    save_model(draft, 2, size, layers=1)
    return target, draft


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a different tokenizer."""
    folder = tmp_path_factory.mktemp("stranger")
    save_model(folder, 3, save_tokenizer(folder, vocab_size=280))
    return folder


@pytest.fixture
def broken(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the target for a test to damage."""
    return Path(shutil.copytree(pair[0], tmp_path / "broken"))


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs the command line in this process."""

    def call(*arguments: object, **keywords: Any) -> Result:
        texts = [str(argument) for argument in arguments]
        return CliRunner().invoke(app, texts, prog_name="outrider", **keywords)

    return call


@pytest.fixture
def generate(pair: tuple[Path, Path], run: Callable[..., Result]) -> Callable[..., Result]:
    """Runs ``outrider generate`` with the tiny pair in float32, for eight tokens."""

    def call(*arguments: object, **keywords: Any) -> Result:
        target, draft = pair
        models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
        return run("generate", *models, "--max-new-tokens", 8, *arguments, **keywords)

    return call


@pytest.fixture(autouse=True)
def _no_process_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start no process that compiles the kernels, which tests that replace the cache
    folder would do without need."""
    monkeypatch.setattr("outrider.cli.start.begin_ahead", lambda: None)
