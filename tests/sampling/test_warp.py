"""The warp: parity with transformers, penalties per drafted position, parameters per row."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core import Context, Draft, Lengths, Prefix
from outrider.core.errors import InvalidParameterError
from outrider.sampling import Sampling, Warp
from outrider.testing import SoftmaxDistribution

V = 50
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9]]


def contexts(prompts=PROMPTS, output=3):
    """Prompts followed by a few tokens of output."""
    context = Context.start(prompts, SoftmaxDistribution(), [0] * len(prompts), range(len(prompts)))
    generator = torch.Generator().manual_seed(1)
    emitted_BK = torch.randint(V, (len(prompts), output), generator=generator)
    counts = [(b + 1) % (output + 1) for b in range(len(prompts))]
    context.append(emitted_BK, Lengths.of(counts))
    return context


def drafts(context, num_nodes=7):
    """Binary trees of random tokens."""
    B = context.num_rows
    generator = torch.Generator().manual_seed(2)
    tokens_BN = torch.randint(V, (B, num_nodes), generator=generator)
    tokens_BN[:, 0] = context.root_B
    parents_BN = ((torch.arange(num_nodes) - 1) // 2).expand(B, num_nodes)
    return Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")


def logits_of(context, num_nodes=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shape = (context.num_rows, num_nodes, V)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def warped(sampling, context=None, num_nodes=7, logits_BNV=None):
    context = context or contexts()
    samplings = sampling if isinstance(sampling, list) else [sampling] * context.num_rows
    if logits_BNV is None:
        logits_BNV = logits_of(context, num_nodes)
    draft = drafts(context, num_nodes)
    return Warp(samplings, V)(logits_BNV, Prefix.of_draft(context, draft))


PARITY = {
    "plain": (Sampling(), []),
    "temperature": (Sampling(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top-k": (Sampling(top_k=7), [TopKLogitsWarper(7)]),
    "top-p": (Sampling(top_p=0.83), [TopPLogitsWarper(0.83)]),
    "min-p": (Sampling(min_p=0.06), [MinPLogitsWarper(0.06)]),
    "repetition": (
        Sampling(repetition_penalty=1.7),
        [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "bias": (
        Sampling(logit_bias={3: 2.5, 8: -4.0, 11: -torch.inf}),
        [SequenceBiasLogitsProcessor([[[3], 2.5], [[8], -4.0], [[11], float("-inf")]])],
    ),
    "all": (
        Sampling(
            temperature=1.3,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            repetition_penalty=1.3,
            logit_bias={5: 1.0},
        ),
        [
            SequenceBiasLogitsProcessor([[[5], 1.0]]),
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", PARITY)
def test_parity_with_transformers_at_every_node(name):
    sampling, processors = PARITY[name]
    context = contexts()
    draft, logits_BNV = drafts(context), logits_of(context)
    p_BNV = warped(sampling, context)
    prefix = Prefix.of_draft(context, draft)
    for b in range(context.num_rows):
        for n in range(draft.num_nodes):
            theirs = LogitsProcessorList(processors)(prefix.row(b, n), logits_BNV[b, n][None])
            expected = theirs.softmax(-1)[0]
            assert torch.allclose(p_BNV[b, n], expected, rtol=1e-12, atol=1e-15)
            assert ((p_BNV[b, n] > 0) == (expected > 0)).all()


def test_a_logits_processor_list_gives_the_same_distribution():
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)]
    )
    theirs = warped(Sampling(processors=[processors]))
    ours = warped(Sampling(repetition_penalty=1.7, temperature=0.7, top_k=9))
    assert torch.allclose(theirs, ours, rtol=1e-12, atol=1e-15)


def test_processors_see_the_drafted_path_and_only_their_row():
    context, seen = contexts(), []

    def record(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    warped([Sampling(), Sampling(processors=[record]), Sampling()], context)
    prefix = Prefix.of_draft(context, drafts(context))
    assert seen == [prefix.row(1, n)[0].tolist() for n in range(7)]


def slow_penalties(z_V, tokens, num_prompt, sampling):
    """Reference implementation, token by token."""
    z, output, sampling = z_V.tolist(), tokens[num_prompt:], sampling.with_defaults()
    for v in set(tokens):
        z[v] = (
            z[v] / sampling.repetition_penalty if z[v] > 0 else z[v] * (sampling.repetition_penalty)
        )
    for v in set(output):
        z[v] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(v)
    return torch.tensor(z, dtype=z_V.dtype)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=2.0),
        Sampling(presence_penalty=0.75),
        Sampling(frequency_penalty=-0.5),
        Sampling(repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.25),
    ],
    ids=["repetition", "presence", "frequency", "all"],
)
def test_penalties_of_a_node_count_its_own_path(sampling):
    """Few tokens, so that prompts, outputs and drafts repeat each other."""
    context = Context.start([[3, 1, 4, 1], [2]], SoftmaxDistribution(), [0, 0], [0, 1])
    context.append(torch.tensor([[1, 2, 2], [0, 0, 0]]), Lengths.of([3, 1]))
    tokens_BN = torch.randint(5, (2, 7))
    tokens_BN[:, 0] = context.root_B
    parents_BN = ((torch.arange(7) - 1) // 2).expand(2, 7)
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")
    logits_BNV = torch.randn(2, 7, 5, dtype=torch.float64)
    prefix = Prefix.of_draft(context, draft)
    z_BNV = Warp([sampling] * 2, 5).logits(logits_BNV, prefix)
    for b, num_prompt in enumerate((4, 1)):
        for n in range(7):
            tokens = prefix.row(b, n)[0].tolist()
            expected = slow_penalties(logits_BNV[b, n], tokens, num_prompt, sampling)
            assert torch.allclose(z_BNV[b, n], expected, rtol=1e-12, atol=1e-12)


MIXED = [
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=0, frequency_penalty=0.3),
    Sampling(
        top_p=0.6, min_p=0.1, repetition_penalty=1.4, logit_bias={7: 3.0}, top_p_convention="paper"
    ),
]


def test_rows_with_parameters_of_their_own_equal_each_row_alone():
    together = warped(MIXED)
    logits_BNV = logits_of(contexts())
    whole = contexts()
    for b, sampling in enumerate(MIXED):
        alone = contexts()
        alone.keep([b])
        draft = drafts(whole)
        row = slice(b, b + 1)
        one = Draft(draft.tokens_BN[row], draft.parents_BN[row], draft.mask_BN[row], None, "chosen")
        p_BNV = Warp([sampling], V)(logits_BNV[row], Prefix.of_draft(alone, one))
        assert (p_BNV == together[row]).all()


def test_temperature_zero_is_the_argmax_of_the_penalised_logits():
    sampling = Sampling(temperature=0, repetition_penalty=3.0, top_k=3, top_p=0.5)
    context = contexts()
    p_BNV = warped(sampling, context)
    prefix = Prefix.of_draft(context, drafts(context))
    z_BNV = Warp([sampling] * 3, V).logits(logits_of(context), prefix)
    assert Warp([sampling] * 3, V).greedy
    assert (p_BNV == torch.nn.functional.one_hot(z_BNV.argmax(-1), V)).all()


def test_temperature_zero_takes_the_first_of_equals_beside_infinities():
    logits_BNV = torch.tensor([[[1.0, 2.0, 2.0, -torch.inf]]])
    context = Context.start([[0]], SoftmaxDistribution(), [0], [0])
    prefix = Prefix.of_draft(context, Draft.root_only(context.root_B))
    p_BNV = Warp([Sampling(temperature=0)], 4)(logits_BNV, prefix)
    assert p_BNV.tolist() == [[[0, 1, 0, 0]]]


def test_a_warp_is_greedy_only_if_all_rows_are():
    assert not Warp(MIXED, V).greedy
    assert Warp([MIXED[1]] * 2, V).greedy


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=7),
        Sampling(min_p=0.06),
        Sampling(top_k=9, min_p=0.1),
        Sampling(temperature=0),
    ],
)
def test_truncation_is_idempotent(sampling):
    """Top-p is not: it refers to the remaining mass."""
    once = warped(sampling)
    twice = warped(sampling, logits_BNV=once.log())
    assert ((once > 0) == (twice > 0)).all()
    assert torch.allclose(once, twice, rtol=1e-12, atol=0)


def test_top_k_goes_before_top_p():
    """0.5 of the mass that top-k leaves, not of all."""
    logits_BNV = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=torch.float64).log()[None, None]
    context = Context.start([[0]], SoftmaxDistribution(), [0], [0])
    prefix = Prefix.of_draft(context, Draft.root_only(context.root_B))
    p_BNV = Warp([Sampling(top_k=2, top_p=0.5)], 5)(logits_BNV, prefix)
    assert (p_BNV[0, 0] > 0).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("sampling", [*MIXED, Sampling(top_p=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_logits_give_bit_identical_distributions(sampling, dtype):
    """Draft and target scored in batches of different shapes: p = q exactly, so nothing is
    rejected."""
    context = contexts()
    draft, logits_BNV = drafts(context), logits_of(context, dtype=dtype)
    p_BNV = Warp([sampling] * 3, V)(logits_BNV, Prefix.of_draft(context, draft))
    for n in (0, 1, 3):
        path = [i for i in range(1, 7) if bool(draft.ancestors_BNN[0, n, i])]
        prefix = Prefix.of_chain(context, [draft.tokens_BN[:, i] for i in path])
        q_B1V = Warp([sampling] * 3, V)(logits_BNV[:, n : n + 1].clone(), prefix)
        assert (q_B1V[:, 0] == p_BNV[:, n]).all()


def test_half_precision_logits_become_float32():
    context = contexts()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        p_BNV = warped(Sampling(temperature=0.7), context, logits_BNV=logits_of(context).to(dtype))
        assert p_BNV.dtype == torch.float32
        assert float((p_BNV.sum(-1) - 1).abs().max()) < 1e-5
    assert warped(Sampling()).dtype == torch.float64


def test_the_callers_logits_stay_as_they_are():
    context = contexts()
    logits_BNV = logits_of(context)
    before = logits_BNV.clone()
    doubled = Sampling(processors=[lambda ids, scores: scores.mul_(2)])
    for sampling in (*MIXED, doubled):
        warped(sampling, context, logits_BNV=logits_BNV)
    assert (logits_BNV == before).all()


def test_a_bias_of_minus_infinity_forbids():
    p_BNV = warped(Sampling(logit_bias={3: -torch.inf}))
    assert (p_BNV[..., 3] == 0).all()
    assert not p_BNV.isnan().any()


def test_a_bias_beyond_the_vocabulary_is_an_error():
    with pytest.raises(InvalidParameterError, match="token ids go up to 49"):
        Warp([Sampling(logit_bias={V: 1.0})], V)
