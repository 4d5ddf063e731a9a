"""A head's draft by one program equals the draft made step by step, and outputs are the same."""

import warnings
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from tiny_heads import CountedHeadExecutor, target_of, tiny_head
from tiny_models import greedy, ragged_prompts, token_ids

from outrider import Sampling, Speculation
from outrider.core.errors import OutriderWarning
from outrider.drafters.heads import eagle3_model, head_model
from outrider.drafters.heads.eagle3 import Eagle3Drafter
from outrider.drafters.heads.fused_tree import (
    GreedyHeadTreeDraft,
    HeadTreePlan,
    SampledHeadTreeDraft,
)
from outrider.drafters.tree.grow import Children
from outrider.drafters.tree.topology import Topology
from outrider.engine import Engine
from outrider.engine.warming import warm_up
from outrider.methods import METHODS, heads
from outrider.methods.method import Parts
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.executors.parity import compare
from outrider.runtime.kernels.build import find_compiler


def engine(
    batch: int,
    *,
    compiled: bool,
    method: str = "eagle3",
    of_method: Mapping[str, object] | None = None,
    γ: int = 3,
    traces_rules: bool = False,
    **options: Any,
) -> Engine:
    """An engine with a tiny head; ``options`` are the head's."""
    target = target_of()
    if compiled:
        target.compiled = CompiledExecutor(target.module, target.spec, "target", interpreted)
        target.compiled.sealed = True  # the head's programs are what is tested
    head = tiny_head(target, 17, **options)
    row = METHODS[method]
    made = Engine(
        target, head, row, num_speculative_tokens=γ, max_batch_size=batch, options=of_method
    )
    return without_compiler(made, traces_rules=traces_rules)


@pytest.mark.parametrize(
    "sampling",
    [greedy(16), Sampling(temperature=0.8, seed=3, max_new_tokens=16, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_equal_those_of_step_by_step_drafts(
    sampling: Sampling, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in ragged batches whose rows leave; a prompt of one token among them."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts = ragged_prompts([9, 3, 1, 14], 23)
    wanted = engine(batch, compiled=False).generate(prompts, sampling)
    before = CountedHeadExecutor.calls
    fused = engine(batch, compiled=True)
    found = fused.generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert CountedHeadExecutor.calls > before + 3


TREE_SAMPLINGS = {
    "greedy": greedy(14),
    "sampled": Sampling(temperature=1.0, seed=3, max_new_tokens=14, ignore_eos=True),
    "penalties": Sampling(
        temperature=0.7,
        top_k=9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={3: 2.0},
        seed=3,
        max_new_tokens=14,
        ignore_eos=True,
    ),
}


CASES = [
    ("greedy", "distinct"),  # at temperature 0 all children are the best tokens by rank
    *((sampling, each) for sampling in ("sampled", "penalties") for each in get_args(Children)),
]

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 0)]


def tree_of(children: Children) -> dict[str, object]:
    """How trees are drafted: to the third level, where nodes have ancestors besides the root, but
    for distinct children, whose program differs in how siblings are drawn. A level more takes
    seconds to trace."""
    paths = [path for path in TREE if len(path) < (3 if children == "distinct" else 4)]
    return {"topology": Topology.rank_paths(paths), "children": children}


@pytest.mark.parametrize(("name", "children"), CASES)
def test_outputs_equal_those_of_trees_grown_level_by_level(
    name: str, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in ragged batches whose rows leave; a prompt of one token among them."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    sampling = TREE_SAMPLINGS[name]
    tree = {"method": "eagle3-tree", "of_method": tree_of(children)}
    for batch, lengths in ((1, [9, 1]), (3, [9, 3, 1, 14])):
        prompts = ragged_prompts(lengths, 23)
        wanted = engine(batch, compiled=False, **tree).generate(prompts, sampling)
        before = CountedHeadExecutor.calls
        by_program = engine(batch, compiled=True, traces_rules=children == "distinct", **tree)
        if name == "greedy":  # it traces the target's programs, too
            warm_up(by_program)
        found = by_program.generate(prompts, sampling)
        assert token_ids(found) == token_ids(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.origins == other.origins
            assert one.stats.drafted == other.stats.drafted
            assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
        # The program of the best tokens by rank knows the head's logits only, without penalties.
        has_program = children != "chosen" or sampling.repetition_penalty is None
        assert (CountedHeadExecutor.calls > before + 3) == has_program


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.slow
def test_a_head_and_the_rule_of_its_trees_are_compiled_for_real() -> None:
    """Its tree of sampled children, and the rule, which has loops."""
    tree: dict[str, Any] = {
        "method": "eagle3-tree",
        "of_method": {"topology": Topology.rank_paths([(0,), (1,), (0, 0)]), "children": "iid"},
    }
    prompts, sampling = ragged_prompts([9, 3], 23), TREE_SAMPLINGS["sampled"]
    wanted = engine(2, compiled=False, **tree).generate(prompts, sampling)
    by_program = engine(2, compiled=True, **tree)
    (head,) = by_program.drafter.capabilities.models
    assert head.compiled is not None
    head.compiled.make = compiled_program
    shape = by_program.drafter.capabilities.tree_shape
    by_program.verification = rules = CompiledVerifier(compiled_program, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        found = by_program.generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for programs in (head.compiled._programs, rules._programs):
        assert programs
        assert all(programs.values())


@pytest.mark.parametrize("kind", [GreedyHeadTreeDraft, SampledHeadTreeDraft])
def test_a_program_that_draws_other_children_is_found(kind: Any) -> None:
    target = target_of()
    model = eagle3_model.Eagle3Model(tiny_head(target), target)
    topology = Topology.rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    each = kind(model.module, model.spec, HeadTreePlan(topology, "distinct", model.device))
    in_use = model.example_cache().in_use()
    half = len(in_use) // 2

    def program(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        moving, kv = inputs[: each.num_moving], inputs[each.num_moving :]
        if kind is SampledHeadTreeDraft:
            moving = [*moving[:3], moving[3:-3], *moving[-3:]]
        return list(each(*moving, kv[:half], kv[half:]))

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        results = program(inputs)
        results[2][:, -2] = results[2][:, 1]
        return results

    assert compare(each, program, (in_use[:half], in_use[half:])) == ""
    assert "do not follow" in compare(each, wrong, (in_use[:half], in_use[half:]))


@pytest.mark.parametrize("options", [{"norm_output": True}, {"layers": 2}], ids=str)
def test_programs_of_other_heads(options: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    prompts = ragged_prompts([9, 3], 23)
    found = engine(2, compiled=True, γ=2, **options).generate(prompts, greedy(12))
    wanted = engine(2, compiled=False, γ=2, **options).generate(prompts, greedy(12))
    assert token_ids(found) == token_ids(wanted)
    assert not [w for w in recwarn if "runs eagerly" in str(w.message)]


def test_a_programs_name_tells_heads_apart() -> None:
    """Two heads that differ in an option only."""
    target = target_of()
    heads = [tiny_head(target), tiny_head(target, norm_output=True)]
    names = {repr(eagle3_model.Eagle3Model(head, target).module) for head in heads}
    assert len(names) == 2
    assert torch.equal(heads[0].network.lm_head.weight, heads[1].network.lm_head.weight)


def test_warming_makes_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards no request compiles anything, and chains are fused drafts."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    warmed = engine(1, compiled=True)
    warm_up(warmed)
    (head,) = warmed.drafter.capabilities.models
    assert head.compiled is not None
    assert head.compiled.sealed
    assert len(head.compiled._programs) == 2
    before = CountedHeadExecutor.calls
    warmed.generate(ragged_prompts([9], 23), greedy(12))
    assert CountedHeadExecutor.calls > before


def test_the_head_runs_eagerly_over_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that a round emits are read by the program of the next draft."""
    reads = []

    class Counting(eagle3_model.Eagle3Model):
        def read(self, cache: Any, tokens_BN: Any, hidden_BNF: Any) -> Any:
            reads.append(tokens_BN.shape[1])
            return super().read(cache, tokens_BN, hidden_BNF)

    monkeypatch.setattr(heads, "Eagle3Model", Counting)
    fused = engine(1, compiled=True)
    warm_up(fused)
    reads.clear()
    found = fused.generate(ragged_prompts([9], 23), greedy(20))
    assert found[0].stats.rounds > 10
    assert reads == [8]


@pytest.mark.parametrize("γ", [1, 2])
@pytest.mark.parametrize(
    "sampling",
    [greedy(16), Sampling(temperature=0.8, seed=3, max_new_tokens=16, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
def test_shorter_drafts_are_the_beginning_of_a_program_s(
    sampling: Sampling, γ: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of γ tokens by the program of three are those made step by step, so outputs and
    statistics are the same; the last token has no distribution, or a bonus token would have
    another one."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts, asked = ragged_prompts([9, 3, 14], 23), Speculation(num_speculative_tokens=γ)
    wanted = engine(3, compiled=False).generate(prompts, sampling, speculation=asked)
    before = CountedHeadExecutor.calls
    found = engine(3, compiled=True).generate(prompts, sampling, speculation=asked)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.drafted == other.stats.drafted
    assert CountedHeadExecutor.calls > before + 3


@pytest.mark.parametrize(
    "sampling",
    [greedy(16), Sampling(temperature=0.8, seed=3, max_new_tokens=16, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
def test_a_governed_head_has_a_program_for_drafts_of_one_token(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A governor tries with them whether drafting pays, which should be cheap. They are those made
    step by step, and no other program runs for them."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts, asked = ragged_prompts([9, 3, 14], 23), Speculation(num_speculative_tokens=1)
    wanted = engine(3, compiled=False).generate(prompts, sampling, speculation=asked)
    found = engine(3, compiled=True)
    drafter = found.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.capabilities.fused_lengths == (3,)
    drafter.has_short_program = True
    assert drafter.capabilities.fused_lengths == (3, 1)
    (head,) = drafter.capabilities.models
    assert isinstance(head.compiled, CountedHeadExecutor)
    depths = []
    draft_after = head.compiled.draft_after
    monkeypatch.setattr(
        head.compiled,
        "draft_after",
        lambda cache, newest, plan, *rest: (
            depths.append(plan.depth) or draft_after(cache, newest, plan, *rest)
        ),
    )
    results = found.generate(prompts, sampling, speculation=asked)
    assert token_ids(results) == token_ids(wanted)
    assert set(depths) == {1}
    for one, other in zip(results, wanted, strict=True):
        assert one.stats.drafted == other.stats.drafted


def test_a_governor_asks_for_the_short_program() -> None:
    target = target_of()
    for governed in (False, True):
        parts = Parts(target, head=tiny_head(target), governed=governed)
        drafter = METHODS["eagle3"].recipe().drafter(parts)
        assert drafter.capabilities.fused_lengths == ((5, 1) if governed else (5,))


@pytest.mark.parametrize("method", ["eagle3-hybrid", "eagle3-tree-hybrid"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_head_beside_copies_drafts_by_its_program(
    temperature: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts = [[*prompt, *prompt] for prompt in ragged_prompts([9, 3, 14], 23)]
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=24, ignore_eos=True)
    tree = {"topology": tree_of("distinct")["topology"]}
    asked: Any = {"method": method, "of_method": tree if "tree" in method else {"head_tokens": 3}}
    wanted = engine(3, compiled=False, **asked).generate(prompts, sampling)
    before = CountedHeadExecutor.calls
    fused = engine(3, compiled=True, **asked)
    able = fused.drafter.capabilities
    assert able.fused_tree if able.drafts_trees else able.fused_lengths == (3,)
    assert token_ids(fused.generate(prompts, sampling)) == token_ids(wanted)
    assert CountedHeadExecutor.calls > before + 3
