"""A target that is sharded among two and four processes: the same tokens as on one process."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses
from tiny_models import byte_tokenizer, greedy, ragged_prompts, random_head, tiny_module
from tiny_ngrams import corpus

import outrider
from outrider import Engine, Sampling
from outrider.cluster import sharded
from outrider.cluster.sharded.engine import ShardedEngine
from outrider.cluster.sharded.launch import Launch
from outrider.cluster.sharded.lockstep import END
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model
from outrider.runtime.hf.layout import TensorParallel
from outrider.runtime.hf.sharded import ShardedModel
from outrider.train.ngram import build_ngram

VOCAB = 280
PROMPTS = ragged_prompts([9, 3, 17, 4, 30])
LOSSLESS = [name for name, row in METHODS.items() if row.recipe().verifier.lossless]
SAMPLED = Sampling(temperature=0.9, top_p=0.95, max_new_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of targets and a draft model, and an n-gram file."""
    folder = tmp_path_factory.mktemp("models")
    settings: dict[str, Any] = {"num_key_value_heads": 4, "vocab_size": VOCAB, "eos_token_id": 0}
    for name, family, std in (
        ("llama", "llama", 0.2),
        ("qwen3", "qwen3", 0.2),
        ("draft", "llama", 0.18),
        ("gpt2", "gpt2", 0.2),
    ):
        module = tiny_module(family, std=std, dtype=torch.float64, **settings)
        module.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    build_ngram(folder / "ngrams.safetensors", corpus(VOCAB, [400, 50, 3]), VOCAB, order=4)
    return folder


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    """Greedy and sampled rows of many lengths; more than run at the same time."""
    both = [greedy(12), SAMPLED, greedy(7), SAMPLED, SAMPLED]
    own = greedy(12) if engine.recipe.greedy_only else both
    return [each.token_ids for each in engine.generate(PROMPTS, own)]


def arrivals(engine: Engine) -> list[tuple[int, ...]]:
    """Requests that arrive while others run, one that is ended early, and one more afterwards."""
    first, second = (engine.stream(prompt, SAMPLED) for prompt in PROMPTS[:2])
    ids = [*next(first).token_ids]
    other = [*next(second).token_ids]
    second.close()
    third = engine.generate([PROMPTS[2], PROMPTS[4]], greedy(9))
    ids += [token for event in first for token in event.token_ids]
    again = engine.generate([PROMPTS[3]], SAMPLED)
    return [tuple(ids), tuple(other), *(each.token_ids for each in [*third, *again])]


def periods(engine: Engine) -> list[tuple[int, ...]]:
    """Two requests as a server runs them: it asks for a scheduler again after it was idle."""
    found = []
    for prompt in PROMPTS[:2]:
        scheduler = engine.new_scheduler()
        scheduler.add(engine.request(prompt, SAMPLED, request_number=0))
        while not (progress := scheduler.step()) or not progress[0].row.over:
            pass
        found.append(tuple(progress[0].row.token_ids))
    return found


def run(folder: Path, main: Any, target: str, settings: dict[str, Any]) -> Any:
    """What a rank does."""
    return sharded.run(
        main,
        folder / target,
        folder / "draft",
        dtype="float64",
        max_batch_size=3,
        **settings,
    )


def alone(folder: Path, main: Any, target: str = "llama", **settings: Any) -> Any:
    """The result on one process."""
    models = folder / target, folder / "draft"
    return main(outrider.load(*models, dtype="float64", max_batch_size=3, **settings))


@pytest.mark.parametrize(("size", "target"), [(2, "llama"), (4, "qwen3")])
@pytest.mark.parametrize("placement", sharded.PLACEMENTS)
@pytest.mark.parametrize("main", [tokens, arrivals, periods])
def test_tokens_equal_those_of_one_process(
    ranks: RankProcesses, models: Path, size: int, target: str, placement: str, main: Any
) -> None:
    """In a batch, and as requests arrive and leave."""
    settings = {"draft_placement": placement}
    found = ranks.run(run, models, main, target, settings, size=size)
    assert found == [alone(models, main, target)] + [None] * (size - 1)


@pytest.mark.parametrize("placement", sharded.PLACEMENTS)
def test_admission_is_rank_0s(ranks: RankProcesses, models: Path, placement: str) -> None:
    """Under a bound on memory that fewer rows fit in than may run."""
    settings = {"draft_placement": placement, "max_memory": 300_000}
    assert ranks.run(run, models, tokens, "llama", settings, size=2)[0] == alone(models, tokens)


def test_draft_lengths_are_rank_0s(ranks: RankProcesses, models: Path) -> None:
    """The governor chooses by rank 0's clock; tokens of the coupled method do not depend on it."""
    settings = {"method": "coupled", "num_speculative_tokens": "auto"}
    found = ranks.run(run, models, tokens, "llama", settings, size=2)
    assert found == [alone(models, tokens, method="coupled"), None]


def briefly(engine: Engine) -> list[tuple[int, ...]]:
    """As :func:`tokens`, of fewer and shorter outputs."""
    both = [greedy(6), replace(SAMPLED, max_new_tokens=6), greedy(3)]
    own = greedy(6) if engine.recipe.greedy_only else both
    return [each.token_ids for each in engine.generate(PROMPTS[:3], own)]


def engine_of(folder: Path, target: HFModel, draft: HFModel, method: str, build: Any) -> Engine:
    row = METHODS[method]
    parts: Any = random_head(row.needs_head, target) if row.needs_head else draft
    options = {"file": str(folder / "ngrams.safetensors")} if method == "ngram" else {}
    return build(
        target,
        parts if row.needs_head or row.needs_draft else None,
        row,
        num_speculative_tokens=4,
        options=options,
        max_batch_size=2,
    )


def run_all(folder: Path, methods: list[str]) -> dict[str, Any]:
    """What a rank does: it runs one engine after another on the same models."""
    launch = Launch.of_environment()
    assert launch is not None
    found = {}
    with sharded.joined(launch) as ranks:
        layout = TensorParallel(ranks.size)
        target = load_model(folder / "llama", dtype="float64", layout=layout)
        draft = load_model(folder / "draft", dtype="float64")
        for method in methods:
            engine = engine_of(folder, target, draft, method, partial(ShardedEngine, ranks))
            if ranks.leads:
                found[method] = briefly(engine)
                ranks.dismiss((END, None))
            else:
                sharded.Follower(ranks, engine.new_scheduler()).follow()
    return found


@pytest.fixture(scope="module")
def one_process(models: Path) -> dict[str, Any]:
    """The tokens of every lossless method on one process."""
    target = load_model(models / "llama", dtype="float64")
    draft = load_model(models / "draft", dtype="float64")
    return {name: briefly(engine_of(models, target, draft, name, Engine)) for name in LOSSLESS}


OF_FOUR = [
    *("plain", "speculative", "coupled", "sequoia", "dynamic-tree", "traversal", "prompt-lookup"),
    *("staged", "early-exit", "hybrid", "eagle3-tree", "dflash", "medusa-lossless"),
]
"""Methods that run on four ranks, too, of each kind one: what the ranks of a target exchange
depends on the passes that a method makes."""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "methods"), [(2, LOSSLESS), (4, OF_FOUR)], ids=["two", "four"])
def test_all_lossless_methods(
    ranks: RankProcesses,
    models: Path,
    one_process: dict[str, Any],
    size: int,
    methods: list[str],
) -> None:
    """Trees, heads, searches in the output, several draft models, and the target's own layers."""
    wanted = {method: one_process[method] for method in methods}
    assert ranks.run(run_all, models, methods, size=size)[0] == wanted


def parameters(folder: Path) -> tuple[bool, int, int]:
    """Whether the target is sharded, its bytes of KV buffers per token, and the parameters that
    the draft model has on this rank."""
    launch = Launch.of_environment()
    assert launch is not None
    with sharded.joined(launch) as ranks:
        engine = sharded.load(
            ranks, folder / "llama", folder / "draft", dtype="float64", draft_placement="rank0"
        )
        cache = engine.target.example_cache()
        width = sum(key.shape[1] * key.shape[3] for key in cache.keys if key is not None)
        assert engine.draft is not None
        weights = engine.draft.module.parameters()
        present = sum(each.numel() for each in weights if each.device.type != "meta")
        ranks.meet("the end")
        return isinstance(engine.target, ShardedModel), width, present


def test_each_rank_holds_its_part(ranks: RankProcesses, models: Path) -> None:
    """The heads are divided, and rank 0 alone has the draft model's weights."""
    draft = load_model(models / "draft").module
    whole = sum(each.numel() for each in draft.parameters())
    width = 2 * 32
    assert ranks.run(parameters, models, size=2) == [
        (True, width // 2, whole),
        (True, width // 2, 0),
    ]
