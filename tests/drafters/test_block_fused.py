"""A block head's draft by one program equals the draft made slot by slot."""

from typing import Any

import pytest
from interpreted_graphs import interpreted, without_compiler
from tiny_block_heads import DSPARK, tiny_block_head
from tiny_heads import CountedHeadExecutor, peagle_head, target_of
from tiny_models import greedy, ragged_prompts, token_ids

from outrider import Sampling
from outrider.drafters.heads import head_model
from outrider.drafters.heads.block_model import BlockModel
from outrider.engine import Engine
from outrider.engine.warming import warm_up
from outrider.methods import METHODS
from outrider.runtime.executors.compiled import CompiledExecutor

HEADS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "dflash": (None, {"block_size": 3}),
    "dspark": (17, DSPARK | {"block_size": 3, "num_layers": 1}),
    "peagle": (17, {"num_tokens": 3}),
}
"""Draft vocabulary and options; a head without a vocabulary of its own has the target's output. One
alone has two layers, since tracing takes time by the layer and by the slot."""


def engine(kind: str, batch: int, *, compiled: bool) -> Engine:
    target = target_of()
    if compiled:
        target.compiled = CompiledExecutor(target.module, target.spec, "target", interpreted)
        target.compiled.sealed = True  # the head's programs are what is tested
    size, options = HEADS[kind]
    make: Any = peagle_head if kind == "peagle" else tiny_block_head
    head = make(target, size, **options)
    made = Engine(target, head, METHODS[kind], max_batch_size=batch)
    return without_compiler(made, traces_rules=False)


@pytest.mark.parametrize(
    "sampling",
    [greedy(16), Sampling(temperature=0.8, seed=3, max_new_tokens=16, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("kind", list(HEADS))
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_equal_those_of_step_by_step_drafts(
    kind: str,
    sampling: Sampling,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Alone, and in ragged batches whose rows leave; a prompt of one token among them."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts = ragged_prompts([9, 3, 1, 14], 23)
    wanted = engine(kind, batch, compiled=False).generate(prompts, sampling)
    before = CountedHeadExecutor.calls
    found = engine(kind, batch, compiled=True).generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert CountedHeadExecutor.calls > before + 3
    assert not [w for w in recwarn if "runs eagerly" in str(w.message)]


def test_the_network_runs_eagerly_over_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states of a round are read by the program of the next draft."""
    reads = []
    plain = BlockModel.read

    def read(self: BlockModel, cache: Any, hidden_BNF: Any) -> None:
        reads.append(hidden_BNF.shape[1])
        plain(self, cache, hidden_BNF)

    monkeypatch.setattr(BlockModel, "read", read)
    fused = engine("dspark", 1, compiled=True)
    warm_up(fused)
    reads.clear()
    found = fused.generate(ragged_prompts([9], 23), greedy(20))
    assert found[0].stats.rounds > 10
    assert reads[0] == 8
    assert len(reads) <= 1 + 4  # the last rounds draft less than the program does
