"""A target that is sharded among two and four processes: the same tokens as on one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses
from tiny_models import byte_tokenizer, greedy, ragged_prompts, tiny_module

import outrider
from outrider import Engine, Sampling
from outrider.cluster import sharded
from outrider.methods import METHODS

PROMPTS = ragged_prompts([9, 3, 17, 4, 30])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    settings: dict[str, Any] = {"dtype": torch.float64, "num_key_value_heads": 4, "vocab_size": 280}
    for name, family, std in (
        ("target", "llama", 0.2),
        ("draft", "llama", 0.18),
        ("qwen3", "qwen3", 0.2),
        ("unplanned", "gpt2", 0.2),
    ):
        more = settings if family != "gpt2" else {"dtype": torch.float64}
        tiny_module(family, std=std, **more).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def samplings() -> list[Sampling]:
    sampled = Sampling(temperature=0.9, top_p=0.95, max_new_tokens=12, seed=3, ignore_eos=True)
    return [greedy(12), sampled, greedy(7), sampled, sampled]


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(PROMPTS, samplings())]


def generate(folder: Path, settings: dict[str, Any]) -> Any:
    """What a rank does."""
    return sharded.run(
        tokens, folder / "target", folder / "draft", dtype="float64", max_batch_size=3, **settings
    )


def alone(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    """The tokens of one process."""
    return tokens(
        outrider.load(
            folder / "target", folder / "draft", dtype="float64", max_batch_size=3, **settings
        )
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("placement", sharded.PLACEMENTS)
def test_tokens_equal_those_of_one_process(
    ranks: RankProcesses, models: Path, size: int, placement: str
) -> None:
    found = ranks.run(generate, models, {"draft_placement": placement}, size=size)
    assert found == [alone(models)] + [None] * (size - 1)
