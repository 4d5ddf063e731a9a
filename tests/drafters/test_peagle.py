"""P-EAGLE heads: what the published package computes, and lossless drafts by one pass.

The fixtures come from ``scripts/speculators_fixtures.py``: the package ``speculators`` 0.9.0 wrote
the checkpoints and computed the logits of every depth behind every slot.

Legend: T tokens, D draft vocabulary.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_eagle3_formats import CLOSE, FIXTURES, TARGET
from tiny_heads import hidden_states, peagle_head, target_of, tiny_head
from tiny_models import engine_of, greedy, ragged_prompts, token_ids
from torch import Tensor

import outrider
from outrider import Sampling
from outrider.core import Context, Verifier
from outrider.core.errors import IncompatibleError, ModelLoadError
from outrider.drafters.heads.block import BlockDrafter
from outrider.drafters.heads.formats.eagle3 import load_eagle3, save_eagle3
from outrider.drafters.heads.formats.folder import read_config, read_tensors
from outrider.drafters.heads.kinds import format_of
from outrider.drafters.heads.peagle import PEagleHead, PEagleModel
from outrider.drafters.tree.topology import Topology
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.sampling import Warp
from outrider.testing import SoftmaxDistribution, chi2, enumerate_round
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.peagle import Masks, PEagleTraining
from outrider.train.heads.states import StateSample
from outrider.verifiers import Block, Distinct, Rejection, Traversal

NAMES = ("peagle", "peagle-post-norm")
V = 3
PAIR_TARGET = target_of(V, dtype=torch.float64, std=0.1)
TREE = Topology.expansion([2, 1])


def fixture(name: str) -> tuple[PEagleHead, dict[str, Tensor]]:
    """A head that the package wrote, and its inputs and logits."""
    head = load_eagle3(FIXTURES / name, TARGET)
    assert isinstance(head, PEagleHead)
    return head, load_file(FIXTURES / f"{name}-expected.safetensors")


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_computes_what_the_package_computes(name: str) -> None:
    """All slots, behind prompts of every length, alone and in one batch; and again after tokens
    that were committed, which are read with the target's hidden states."""
    head, wanted = fixture(name)
    model, tokens, hidden_TF = (
        PEagleModel(head, TARGET),
        wanted["tokens"].tolist(),
        wanted["hidden"],
    )
    lengths = range(3, len(tokens) - 1)
    for rows in ([n] for n in lengths), [[*lengths]]:
        for numbers in rows:
            prompts = [tokens[:n] for n in numbers]
            context = Context.start(prompts, SoftmaxDistribution(), [0] * len(prompts), numbers)
            cache = model.start(context)
            hidden_BTF = hidden_TF.expand(len(prompts), -1, -1)[:, : max(numbers) - 1]
            model.read_prompt(cache, context, hidden_BTF[:, :1], 0)
            model.read_prompt(cache, context, hidden_BTF[:, 1:], 1)
            for _ in range(2):  # the second pass reads the newest tokens again
                slots = model.predict(cache, context, 3)
                assert slots.num == 3
                for d in range(3):
                    for row, n in enumerate(numbers):
                        rows_TD = wanted[f"logits.{d}"]
                        if n - 2 < len(rows_TD):
                            found_D = slots.logits(d, context.root_B[:, None])[row, 0]
                            torch.testing.assert_close(found_D, rows_TD[n - 2], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_training_computes_what_the_package_computes(name: str) -> None:
    head, wanted = fixture(name)
    tokens_T, F = wanted["tokens"], head.config.fused_size
    T = len(tokens_T)
    hidden_TF = torch.cat([wanted["hidden"], torch.zeros(1, F)])
    sample = StateSample(
        tokens_T, torch.ones(T, dtype=torch.bool), hidden_TF, torch.zeros(T, 16), torch.zeros(T)
    )
    training = PEagleTraining(head.network, head.vocabulary, TARGET, embedding=head.embedding)
    anchors = [torch.arange(T - 1 - d) for d in (1, 2)]
    anchor_1M, nums = torch.cat(anchors)[None], [len(each) for each in anchors]
    depth_M = torch.cat([torch.full((num,), d) for d, num in enumerate(nums, 1)])
    masks = Masks(anchor_1M, depth_M, torch.ones_like(anchor_1M, dtype=torch.bool))
    output_1NH = training.outputs(StateBatch.of([sample]), masks)
    for d, found_TD in enumerate(head.network.logits(output_1NH)[0].split([T - 1, *nums])):
        torch.testing.assert_close(found_TD, wanted[f"logits.{d}"], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_has_the_packages_fields(name: str, tmp_path: Path) -> None:
    head, _ = fixture(name)
    save_eagle3(head, tmp_path, torch.float32)
    found, wanted = read_config(tmp_path), read_config(FIXTURES / name)
    assert found is not None
    assert wanted is not None
    own = {"transformers_version", "auto_map", "transformer_layer_config", "target_hidden_size"}
    assert {key: found.get(key) for key in wanted.keys() - own} == {
        key: wanted[key] for key in wanted.keys() - own
    }
    saved, written = read_tensors(tmp_path), load_file(FIXTURES / name / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[key], written[key]) for key in saved)
    kind = format_of(tmp_path)
    assert kind is not None
    assert (kind.kind, kind.method) == ("peagle", "peagle")


def test_files_that_are_not_complete_are_refused(tmp_path: Path) -> None:
    head = peagle_head(target_of(), 17)
    save_eagle3(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def with_mask(mask: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | {"mask_token_id": mask}))

    with_mask(None)
    with pytest.raises(ModelLoadError, match="no 'mask_token_id'"):
        load_eagle3(tmp_path, target_of())
    with_mask(99)
    with pytest.raises(ModelLoadError, match="mask_token_id 99: its target has 23 tokens"):
        load_eagle3(tmp_path, target_of())


def test_methods_of_other_heads_refuse_it() -> None:
    target = target_of()
    with pytest.raises(IncompatibleError, match="peagle"):
        Engine(target, peagle_head(target), METHODS["eagle3"])
    with pytest.raises(IncompatibleError, match="eagle3"):
        Engine(target, tiny_head(target), METHODS["peagle"])


# ------------------------------------------------------------------------------------- drafts


def drafter(topology: Topology | None = None) -> BlockDrafter:
    return BlockDrafter(peagle_head(PAIR_TARGET, V - 1, 2), PAIR_TARGET, topology=topology)


PAIRS: dict[str, tuple[Callable[[], Any], Verifier]] = {
    "chain, rejection": (drafter, Rejection()),
    "chain, block": (drafter, Block()),
    "tree, distinct": (lambda: drafter(TREE), Distinct()),
    "tree, traversal": (lambda: drafter(TREE), Traversal()),
}


def warm(num_rows: int) -> Warp:
    return Warp([Sampling(temperature=0.8, top_p=0.9)] * num_rows, V)


@torch.inference_mode()
@pytest.mark.parametrize("pair", PAIRS)
def test_enumerated(pair: str) -> None:
    """ENUM over one round behind a prompt of four tokens; some drafts are accepted whole."""
    make, verifier = PAIRS[pair]
    each = make()
    target = PAIR_TARGET.with_hidden_states(each.capabilities.hidden_layers)
    done = enumerate_round(target, each, verifier, 2, prompt=(0, 2, 1, 1), distribution=warm)
    assert done.total_variation < 1e-12
    assert sum(mass for tokens, mass in done.emitted.items() if len(tokens) == 3) > 0.01


@torch.inference_mode()
@pytest.mark.parametrize("pair", PAIRS)
def test_sampled(pair: str) -> None:
    """CHI2 over the first four tokens, several rounds. False alarms: 1e-4 for another seed."""
    make, verifier = PAIRS[pair]
    each = make()
    target = PAIR_TARGET.with_hidden_states(each.capabilities.hidden_layers)
    p_value = chi2(target, each, verifier, 2, prompt=(0, 2, 1), num_rows=4000, distribution=warm)
    assert p_value > 1e-4


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("peagle")])
def test_greedy_output_is_plain_decodings(method: str) -> None:
    """Ragged rows that leave and join, a prompt of one token among them."""
    target, prompts = target_of(), ragged_prompts([9, 1, 4, 12], 23)
    samplings = [greedy(9), greedy(20), greedy(5), greedy(14)]
    engine = Engine(target, peagle_head(target, 17), METHODS[method], max_batch_size=2)
    found = engine.generate(prompts, samplings)
    assert token_ids(found) == token_ids(engine_of(target).generate(prompts, samplings))
    assert found.stats.drafted > 0


def test_every_draft_is_that_of_the_whole_context_run_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds that accept some tokens and none."""
    target = target_of(7)
    head = peagle_head(target)
    seen: list[tuple[list[int], list[int]]] = []
    plain = BlockDrafter.propose

    def propose(self: BlockDrafter, state: Any, context: Context, *rest: Any) -> Any:
        draft = plain(self, state, context, *rest)
        tokens = context.tokens_BT[0, : context.lengths[0]].tolist()
        seen.append((tokens, draft.tokens_BN[0, 1:].tolist()))
        return draft

    monkeypatch.setattr(BlockDrafter, "propose", propose)
    engine = Engine(target, head, METHODS["peagle"])
    found = engine.generate([[1, 2, 3, 4, 5]], greedy(40))
    assert 0 < found.stats.accepted < found.stats.drafted
    assert len(seen) > 10
    for tokens, drafted in seen:
        assert drafted == _anew(head, target, tokens)[: len(drafted)]


def _anew(head: PEagleHead, target: Any, tokens: Sequence[int]) -> list[int]:
    """The head's greedy draft behind a context, by one pass over all of it."""
    model = PEagleModel(head, target)
    context = Context.start([list(tokens)], SoftmaxDistribution(), [0], [0])
    cache = model.start(context)
    hidden_TF = hidden_states(target, tokens[:-1], head.target_layers)
    with torch.inference_mode():
        model.read_prompt(cache, context, hidden_TF[None], 0)
        slots = model.predict(cache, context, 3)
    ids_D = head.vocabulary.target_ids_D
    return [int(ids_D[slots.logits(d, context.root_B[:, None]).argmax()]) for d in range(3)]


def test_a_folder_is_loaded_by_its_name_alone(tmp_path: Path) -> None:
    target = target_of()
    save_eagle3(peagle_head(target, 17), tmp_path, torch.float32)
    engine = outrider.load(target.module, str(tmp_path), device="cpu", dtype="float32")
    assert engine.method.name == "peagle"
    plain = engine_of(target).generate([[5, 6, 7]], greedy(8))
    assert token_ids(engine.generate([[5, 6, 7]], greedy(8))) == token_ids(plain)
