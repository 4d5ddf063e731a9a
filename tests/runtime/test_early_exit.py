"""Early exit: the halves make the whole, nothing is computed twice, and the text stays what it was.

Legend: B rows, N nodes, V vocabulary.
"""

import copy
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB,
    engine_of,
    full_logits,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)

from outrider import Sampling
from outrider.core import Acceptance, Budget, Context, Draft, Scores, commit_round, run_round
from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.drafters.chain.early_exit import EarlyExitDrafter, EarlyExitState
from outrider.drafters.chain.model import ModelState
from outrider.methods.self_draft import SELF_DRAFTS, ExitLayer
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit, SharedCache
from outrider.sampling import Warp
from outrider.testing import check_drafter, enumerate_round
from outrider.verifiers import Rejection

METHOD = SELF_DRAFTS[1]
LAYERS = 4


def module_of(family: str, **settings: Any) -> Any:
    depth = {"num_hidden_layers": LAYERS}
    if family == "gpt2":
        depth = {"n_layer": LAYERS}
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        settings = {"layer_types": kinds} | settings
    dtype = torch.float32 if family == "mixtral" else torch.float64
    return tiny_module(family, 0, dtype=dtype, **depth, **settings)


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    lists = (m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
    return list(next(m for m in lists if len(m) == LAYERS))


@pytest.mark.parametrize(
    ("family", "k"), [(family, 1 + 2 * (i % 2)) for i, family in enumerate(FAMILIES)]
)
def test_greedy_text_is_that_of_plain_in_every_family(family: str, k: int) -> None:
    """Ragged, past the sliding windows, rows that finish and join."""
    target = HFModel(module_of(family))
    prompts = ragged_prompts([5, 12, 3])
    plain = engine_of(target).generate(prompts, greedy(14))
    early = engine_of(target, None, METHOD, γ=3, options={"layer": k}, max_batch_size=2)
    assert token_ids(early.generate(prompts, greedy(14))) == token_ids(plain)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_passes_a_layer_twice(family: str) -> None:
    """Every layer sees each node of a round once: the first ones one by one as they are drafted,
    the others all together. And the logits are those of one whole pass without a cache."""
    module, k, γ = module_of(family), 2, 4
    target = EarlyExit(HFModel(module), k)
    drafter = EarlyExitDrafter(target)
    passes: list[tuple[int, int]] = []

    def note(number: int) -> Any:
        return lambda part, inputs, output: passes.append((number, output[0].shape[-2]))

    for number, layer in enumerate(layers_of(module)):
        norm = next(m for m in layer.children() if "norm" in type(m).__name__.lower())
        norm.register_forward_hook(note(number))  # within the layer: is it really run?

    prompts = ragged_prompts([6, 6])
    context = Context.start(prompts, Warp([Sampling()] * 2, VOCAB), [0, 0], [0, 1])
    cache, state = target.start(context), drafter.start(context)
    for _ in range(2):
        passes.clear()
        before = [
            row[:n] for row, n in zip(context.tokens_BT.tolist(), context.lengths, strict=True)
        ]
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, Rejection(), Budget(γ))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        first = [(layer, 1) for _ in range(γ + 1) for layer in range(k)]
        assert sorted(set(passes)) == sorted({*first, *((n, γ + 1) for n in range(k, LAYERS))})
        for layer in range(LAYERS):
            widths = {width for number, width in passes if number == layer}
            assert widths == ({1} if layer < k else {γ + 1})
        norms = {n: sum(number == n for number, _ in passes) for n in range(LAYERS)}
        assert all(norms[layer] == (γ + 1) * norms[k] for layer in range(k))
        for row in range(2):
            tokens = [*before[row], *round_.draft.tokens_BN[row, 1:].tolist()]
            whole_NV = full_logits(module, tokens)[-γ - 1 :]
            torch.testing.assert_close(
                round_.scores.logits_BNV[row], whole_NV, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(
    "settings", [{}, {"draft_length": "survival:0.9"}, {"draft_length": "heuristic"}]
)
def test_it_is_speculation_with_the_truncated_model(settings: dict[str, Any]) -> None:
    """Token for token at temperature 0.8: the draft is the model of the first k layers."""
    module, k = module_of("llama"), 2
    truncated = copy.deepcopy(module)
    truncated.model.layers = truncated.model.layers[:k]
    truncated.config.num_hidden_layers = k
    prompts = ragged_prompts([5, 1, 9])
    sampling = Sampling(temperature=0.8, max_new_tokens=20, ignore_eos=True)
    two = engine_of(HFModel(module), HFModel(truncated), **settings).generate(prompts, sampling)
    early = engine_of(HFModel(module), None, METHOD, options={"layer": k}, **settings)
    one = early.generate(prompts, sampling)
    assert token_ids(one) == token_ids(two)
    assert (one.stats.drafted, one.stats.accepted) == (two.stats.drafted, two.stats.accepted)
    assert one.stats.draft_seconds > 0


@torch.inference_mode()
def test_a_round_has_exactly_the_targets_distribution() -> None:
    """ENUM."""
    target = EarlyExit(tiny("llama", 0, dtype=torch.float64, vocab_size=3, std=0.25), 1)
    done = enumerate_round(target, EarlyExitDrafter(target), Rejection(), 2, prompt=(0, 1, 2))
    assert done.total_variation < 1e-9


class WithTarget(EarlyExitDrafter):
    """What a round does for this drafter: the target starts, keeps and joins its cache."""

    def start(self, context: Context) -> ModelState:
        cache = self.target.start(context)
        state = super().start(context)
        state.keep = cache.keep  # type: ignore[method-assign]
        return state

    def commit(self, state: Any, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        state.shared.rollback(state.shared.context.sequence_lengths - 1)
        self.target.commit(state.cache, draft, verdict)

    def join(self, state: Any, other: Any) -> None:
        self.target.join(state.cache, other.cache)


@torch.inference_mode()
def test_contract() -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    target = EarlyExit(tiny("llama", 1, dtype=torch.float64, vocab_size=6, std=0.25), 1)
    check_drafter(WithTarget(target), 6)
    check_drafter(EarlyExitDrafter(target), 6, num_samples=0)


@torch.inference_mode()
def test_other_drafts_take_a_whole_pass() -> None:
    """Also right behind a draft of its own that was never scored."""
    target = EarlyExit(HFModel(module_of("llama")), 2)
    drafter = EarlyExitDrafter(target)
    prompts = ragged_prompts([4, 7])
    context = Context.start(prompts, Warp([greedy(9)] * 2, VOCAB), [0, 0], [0, 1])
    cache, state = target.start(context), drafter.start(context)
    drafter.propose(state, context, Budget(3), context.rng)
    tokens_BN = torch.cat([context.root_B[:, None], torch.tensor([[1, 2], [3, 4]])], 1)
    draft = Draft.chain(tokens_BN, torch.ones(2, 3, dtype=torch.bool), None, "chosen")
    scores = target.score(cache, draft)
    for row, prompt in enumerate(prompts):
        whole_NV = full_logits(target.module, [*prompt, *tokens_BN[row, 1:].tolist()])[-3:]
        torch.testing.assert_close(scores.logits_BNV[row], whole_NV)


@torch.inference_mode()
def test_for_another_target_it_is_an_ordinary_draft_model() -> None:
    """The same text as with the cache shared, over rounds that draft nothing, too."""
    module = module_of("llama")
    texts = []
    for shared in (True, False):
        early = EarlyExit(HFModel(module), 2)
        target = early if shared else HFModel(module)
        drafter = EarlyExitDrafter(early)
        distribution = Warp([Sampling(temperature=0.8)] * 2, VOCAB)
        context = Context.start(ragged_prompts([4, 7]), distribution, [0, 0], [0, 1])
        cache, state = target.start(context), drafter.start(context)
        assert isinstance(state, EarlyExitState) == isinstance(cache, SharedCache) == shared
        for γ in (3, 0, 4, 2, 3):
            parts = context, target, cache, drafter, state
            round_ = run_round(*parts, Rejection(), Budget(γ))
            commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        texts.append([context.tokens_BT[b, :n].tolist() for b, n in enumerate(context.lengths)])
    assert texts[0] == texts[1]


@torch.inference_mode()
def test_a_pass_that_fails_leaves_its_batch_as_it_was() -> None:
    """Behind it the same draft is scored as if nothing had happened."""
    target = EarlyExit(HFModel(module_of("llama")), 2)
    drafter = EarlyExitDrafter(target)
    context = Context.start(ragged_prompts([4, 7]), Warp([greedy(9)] * 2, VOCAB), [0, 0], [0, 1])
    cache, state = target.start(context), drafter.start(context)
    draft = drafter.propose(state, context, Budget(3), context.rng)
    wanted_BNV = target.score(cache, draft).logits_BNV
    with pytest.raises(IndexError):
        target.first.read(cache, torch.full((2, 1), VOCAB))  # type: ignore[arg-type]
    torch.testing.assert_close(target.score(cache, draft).logits_BNV, wanted_BNV)


def test_a_layer_whose_forward_somebody_has_replaced_is_run_by_it() -> None:
    module = module_of("llama")
    layers, passes = layers_of(module), []

    def replaced(number: int, forward: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            passes.append(number)
            return forward(*args, **kwargs)

        return note

    for number, layer in enumerate(layers):
        vars(layer)["forward"] = replaced(number, layer.forward)
    engine = engine_of(HFModel(module), None, METHOD, γ=2, options={"layer": 2})
    passes.clear()
    text = engine.generate([[1, 2, 3]], greedy(1))
    assert passes == [0, 1, 2, 3] * 2  # a prefill and a round without a draft
    assert token_ids(text) == token_ids(engine_of(HFModel(module)).generate([[1, 2, 3]], greedy(1)))


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("k", [0, -1, 4, 5, True])
def test_an_exit_outside_the_model(k: int) -> None:
    with pytest.raises(InvalidParameterError, match="has 4 layers; the exit is after layer 1 to 3"):
        EarlyExit(HFModel(module_of("llama")), k)


def test_one_layer_cannot_be_split() -> None:
    with pytest.raises(InvalidParameterError, match="has one layer"):
        engine_of(tiny(num_hidden_layers=1), None, METHOD)


def test_the_layer_by_name() -> None:
    assert ExitLayer.parse("half") == ExitLayer()
    assert ExitLayer.parse("3") == ExitLayer.parse(3) == ExitLayer(3)
    assert [str(ExitLayer()), str(ExitLayer(2))] == ["half", "2"]
    with pytest.raises(InvalidParameterError, match="layer='most': must be 'half' or a whole"):
        METHOD.recipe({"layer": "most"})
    with pytest.raises(InvalidParameterError, match="layer=9: model has 4 layers"):
        engine_of(HFModel(module_of("llama")), None, METHOD, options={"layer": 9})


def test_layers_that_share_more_than_a_hidden_state_are_refused() -> None:
    """Layer 2 adds what layer 0 made: the second half alone cannot know it."""
    module = module_of("llama")
    made: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda *call: made.clear())
    layers = layers_of(module)
    layers[0].mlp.register_forward_hook(lambda part, inputs, output: made.append(output))
    layers[2].mlp.register_forward_hook(lambda part, inputs, output: output + sum(made))
    with pytest.raises(UnsupportedModelError, match="need more than the hidden state"):
        EarlyExit(HFModel(module), 1)


def test_layers_that_are_in_no_list_are_refused() -> None:
    module = module_of("llama")
    module.config.num_hidden_layers = 3
    with pytest.raises(UnsupportedModelError, match="in no list of 3"):
        EarlyExit(HFModel(module), 1)
