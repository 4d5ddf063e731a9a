"""Medusa heads: head i predicts the i-th token after the root from the hidden state before it.

Legend: B rows, N nodes, H width, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import hidden_states, started, target_of, tiny_medusa
from tiny_models import engine_of, greedy, ragged_prompts, token_ids
from torch import Tensor, nn

import outrider
from outrider import Sampling
from outrider.core import Budget, Scores, commit_round, run_round
from outrider.core.errors import IncompatibleError, ModelLoadError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.formats.medusa import WEIGHTS, load_medusa, save_medusa
from outrider.drafters.heads.medusa import MedusaDrafter, MedusaHead
from outrider.drafters.heads.medusa_network import MedusaConfig, MedusaNetwork
from outrider.drafters.tree.topology import Topology
from outrider.sampling import Warp
from outrider.testing import check_drafter, chi2, enumerate_round
from outrider.verifiers import Distinct, Rejection, Traversal

TARGET = target_of(dtype=torch.float64)
V = TARGET.num_tokens
TOY = target_of(3, dtype=torch.float64, std=0.25)
CHAIN, TREE = Topology.chain(3), Topology.expansion([2, 2])


def warp(rows: int, num_tokens: int = V, temperature: float = 0.9) -> Warp:
    return Warp([Sampling(temperature=temperature)] * rows, num_tokens)


def with_states(target: Any, drafter: MedusaDrafter) -> Any:
    return target.with_hidden_states(drafter.capabilities.hidden_layers)


def reference(head: MedusaHead, hidden_H: Tensor, number: int) -> Tensor:
    """Logits of one head over the target's vocabulary, (V,), in plain torch."""
    weights = dict(head.network.named_parameters())
    L = head.config.num_layers
    for j in range(L):
        prefix = f"medusa_head.{number}.{j}.linear."
        y_H = weights[f"{prefix}weight"].double() @ hidden_H + weights[f"{prefix}bias"].double()
        hidden_H = hidden_H + y_H * y_H.sigmoid()
    logits_V = torch.full((head.vocab_size,), -torch.inf, dtype=torch.float64)
    output_DH = weights[f"medusa_head.{number}.{L}.weight"].double()
    logits_V[head.vocabulary.target_ids_D] = output_DH @ hidden_H
    return logits_V


def largest_error(drafter: MedusaDrafter, head: MedusaHead, num_rounds: int) -> float:
    """How far q of any node is from the head's over the hidden state of the token before the root,
    which the target computes anew; over rows of different lengths and several rounds."""
    rule = Rejection() if drafter.drawn == "iid" else Distinct()
    prompts = ragged_prompts([9, 3, 6, 5, 4, 7, 8, 2] * 2, V)
    target, context, cache, state = started(drafter, TARGET, prompts, warp(16), 4)
    worst, accepted = 0.0, 0
    for _ in range(num_rounds):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, rule, Budget(5))
        draft = round_.proposed
        assert draft.probs_BNV is not None
        for b, length in enumerate(context.lengths):
            tokens = context.tokens_BT[b, :length].tolist()
            hidden_H = hidden_states(TARGET, tokens, [TARGET.num_layers])[length - 2]
            for i in range(draft.num_nodes):
                depth = int(draft.depth_BN[b, i])
                if draft.parents_BN[b].eq(i).any():
                    q_V = (reference(head, hidden_H, depth) / 0.9).softmax(-1)
                    worst = max(worst, float((draft.probs_BNV[b, i] - q_V).abs().max()))
        accepted += int(round_.verdict.num_accepted_B.sum())
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
    assert accepted
    return worst


@torch.inference_mode()
@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize(("topology", "children"), [(CHAIN, "iid"), (TREE, "distinct")])
def test_drafts_from_the_heads_over_the_true_hidden_state(
    num_layers: int, topology: Topology, children: Any
) -> None:
    head = tiny_medusa(TARGET, 17, num_layers=num_layers)
    drafter = MedusaDrafter(head, TARGET, topology, children)
    assert largest_error(drafter, head, 5) < 1e-9


class RootsState(MedusaDrafter):
    """MUT: reads the hidden state one node too early, as if the root's were not known yet."""

    def commit(self, state: Any, draft: Any, verdict: Any, scores: Any) -> None:
        late = Scores(scores.logits_BNV, scores.hidden_BNH.roll(1, 1))
        super().commit(state, draft, verdict, late)


class OneHeadOff(MedusaDrafter):
    """MUT: skips the first head, as if it predicted the root."""

    def propose(self, *args: Any) -> Any:
        heads = self.network.medusa_head
        self.network.medusa_head = nn.ModuleList([*heads[1:], heads[0]])
        draft = super().propose(*args)
        self.network.medusa_head = heads
        return draft


@torch.inference_mode()
@pytest.mark.parametrize("wrong", [RootsState, OneHeadOff])
def test_a_wrong_alignment_would_be_found(wrong: type) -> None:
    head = tiny_medusa(TARGET, 17)
    assert largest_error(wrong(head, TARGET, CHAIN, "iid"), head, 4) > 1e-2


@torch.inference_mode()
def test_alignment_without_training() -> None:
    """On a target that reads its last token alone, x_{t+1} = f(x_t), the successors of the root are
    f(f(x_t)), f(f(f(x_t))), …: heads that are right about position t+1+i are accepted always."""
    target = target_of(dtype=torch.float64)
    with torch.no_grad():
        for layer in target.module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    each = torch.arange(V)
    f = target.module(each[:, None], use_cache=False).logits[:, 0].argmax(-1)
    h_VH = target.module.model(each[:, None], use_cache=False).last_hidden_state[:, 0]
    network = MedusaNetwork(MedusaConfig(3, 0, h_VH.shape[1], V, V, target.num_layers))
    successor = f
    for head in network.medusa_head:
        successor = f[successor]  # head i maps the state of x_t to the token at t+1+i
        wanted_VV = torch.nn.functional.one_hot(successor, V).double()
        head[-1].weight.copy_(torch.linalg.lstsq(h_VH, wanted_VV).solution.T)
    drafter = MedusaDrafter(MedusaHead(network, DraftVocabulary.full(V)), target, CHAIN)
    prompts = [[3, int(f[3])], [5, int(f[5]), int(f[f[5]])]]
    context_parts = started(drafter, target, prompts, warp(2, temperature=0.0))
    for _ in range(3):
        parts = context_parts[1], context_parts[0], context_parts[2], drafter, context_parts[3]
        round_ = run_round(*parts, Rejection(), Budget(3))
        assert round_.verdict.num_accepted_B.tolist() == [3, 3]
        commit_round(*parts, round_, [3, 3])


@torch.inference_mode()
@pytest.mark.parametrize("children", ["iid", "distinct", "chosen"])
@pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])
def test_contract(topology: Topology, children: Any) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    target = target_of(6, dtype=torch.float64)
    drafter = MedusaDrafter(tiny_medusa(target, 5), target, topology, children)
    check_drafter(
        drafter, 6, target=with_states(target, drafter), distribution=lambda rows: warp(rows, 6)
    )


@torch.inference_mode()
@pytest.mark.parametrize("rule", [Distinct(), Traversal()], ids=["distinct", "traversal"])
def test_a_round_has_exactly_the_targets_distribution(rule: Any) -> None:
    """ENUM of trees of draws without replacement."""
    topology = Topology.rank_paths([[0], [1], [0, 0]])
    drafter = MedusaDrafter(tiny_medusa(TOY, 3), TOY, topology, "distinct")
    found = enumerate_round(
        with_states(TOY, drafter),
        drafter,
        rule,
        2,
        prompt=(0, 2, 1),
        distribution=lambda rows: warp(rows, 3),
    )
    assert found.total_variation < 1e-9


@torch.inference_mode()
def test_many_rounds_have_the_targets_distribution() -> None:
    """CHI2 over three tokens of 4,000 rows. A correct drafter fails with probability 1e-4 (seed
    fixed)."""
    drafter = MedusaDrafter(tiny_medusa(TOY, 2), TOY, TREE, "distinct")
    p = chi2(
        with_states(TOY, drafter),
        drafter,
        Distinct(),
        2,
        length=3,
        num_rows=4000,
        distribution=lambda rows: warp(rows, 3),
    )
    assert p > 1e-4


@torch.inference_mode()
def test_a_prompt_of_one_token_has_no_state_to_draft_from() -> None:
    drafter = MedusaDrafter(tiny_medusa(TARGET, V), TARGET, CHAIN)
    _, context, _, state = started(drafter, TARGET, [[3], [4, 5]], warp(2))
    draft = drafter.propose(state, context, Budget(3), context.rng)
    assert draft.num_drafted_B.tolist() == [0, 3]


def test_heads_of_other_targets_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"23 tokens.*29"):
        MedusaDrafter(tiny_medusa(TARGET, V), target_of(29), CHAIN)


@pytest.mark.parametrize("size", [V, 17])
def test_written_heads_are_read_again(size: int, tmp_path: Path) -> None:
    head = tiny_medusa(TARGET, size, num_layers=2)
    save_medusa(head, tmp_path, "org/target", torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    names = set(load_file(tmp_path / WEIGHTS)) - {"d2t", "t2d"}
    assert names >= {"0.0.linear.weight", "0.0.linear.bias", "2.1.linear.bias", "2.2.weight"}
    again = load_medusa(tmp_path, TARGET)
    assert torch.equal(again.vocabulary.target_ids_D, head.vocabulary.target_ids_D)
    for name, parameter in head.network.named_parameters():
        assert torch.equal(again.network.get_parameter(name), parameter)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_the_authors_files_are_read(prefix: str, tmp_path: Path) -> None:
    """``medusa_lm_head.pt``; a config that names fewer heads than there are; ``load`` finds the
    method. Greedy output is plain's."""
    target = target_of()
    head = tiny_medusa(target, V)
    named = head.network.named_parameters()
    tensors = {prefix + name.removeprefix("medusa_head."): p.detach() for name, p in named}
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = outrider.load(target, draft=tmp_path)
    assert engine.method.name == "medusa"
    prompts = ragged_prompts([5, 1], V)
    plain = engine_of(target).generate(prompts, greedy(12))
    assert token_ids(engine.generate(prompts, greedy(12))) == token_ids(plain)
    again = load_medusa(tmp_path, target)
    assert again.config.num_heads == 3


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="medusa_num_heads"):
        load_medusa(tmp_path, TARGET)
    save_medusa(tiny_medusa(TARGET, V), tmp_path, dtype=torch.float32)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for changed, message in [
        ({"medusa_num_heads": 5}, r"medusa_num_heads 5.*3"),
        ({"medusa_num_layers": 2}, r"0\.2\.weight"),
    ]:
        file.write_text(json.dumps(config | changed))
        with pytest.raises(ModelLoadError, match=message):
            load_medusa(tmp_path, TARGET)
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["1.0.linear.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelLoadError, match=r"1\.0\.linear\.bias.*\(7,\).*\(32,\)"):
        load_medusa(tmp_path, TARGET)
