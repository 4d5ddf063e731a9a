"""``engine.adapt`` with an EAGLE-3 head: what is recorded, what is learned, that outputs stay.

Legend: T tokens, S sequences, V vocabulary, D draft vocabulary.
"""

import os
import random
import signal
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from online_helpers import QUICK, Watching, sampled
from tiny_heads import hidden_states, reference_logits, target_of, tiny_head
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, token_ids
from torch import Tensor

from outrider import Engine, Sampling
from outrider.core.errors import IncompatibleError, OutriderWarning
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.formats.eagle3 import load_eagle3
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.weights import StagedWeights, plain_weights
from outrider.testing import chi2_p_value
from outrider.train.online import Adaptation, adaptable_methods
from outrider.train.online.collector import Collector, RateLimit
from outrider.train.online.eagle3_head import (
    HeadRecorder,
    HeadStudent,
    HeadSubject,
    longest_run,
    model_of,
)
from outrider.train.online.files import load_weights
from outrider.train.online.learner import version_path
from outrider.train.online.process import ProcessWorker
from outrider.train.online.samples import HeadSample

V, D = 23, 18
PROMPTS = ragged_prompts([9] * 8, V)
METHODS_WITH_HEADS = (
    "eagle3",
    "eagle3-hybrid",
    "eagle3-tree",
    "eagle3-tree-hybrid",
    "eagle3-dynamic-tree",
)
LEARNS = replace(QUICK, learning_rate=1e-2)


def headed(method: str = "eagle3", head: Eagle3Head | None = None, γ: int = 3) -> Engine:
    """An engine with a random head, of whose drafts little is accepted."""
    target = target_of(V)
    head = head or tiny_head(target, D)
    return Engine(target, head, METHODS[method], num_speculative_tokens=γ)


def running(engine: Engine) -> dict[str, Tensor]:
    """The weights that the engine's drafter runs."""
    model = model_of(engine)
    assert model is not None
    return plain_weights(model.network)


def traffic(engine: Engine, adaptation: Adaptation, times: int) -> list[float]:
    alphas = []
    for _ in range(times):
        alphas.append(engine.generate(PROMPTS, sampled(32)).stats.alpha)
        assert adaptation.flush(120)
    return alphas


# ----------------------------------------------------------------------------- what is recorded


@dataclass
class Collecting(Watching):
    collector: Collector[HeadSample] | None = None

    def observe(self, round_, rows):  # type: ignore[no-untyped-def]
        assert self.collector is not None
        self.blocks = self.collector.blocks(round_, rows)
        return super().observe(round_, rows)

    def read(self, done, line) -> None:  # type: ignore[no-untyped-def]
        assert self.collector is not None
        self.collector.read(done, line)


def collected(engine: Engine, top_k: int, sampling: Sampling, span: int = 12) -> list[HeadSample]:
    """What is recorded while the prompts are continued."""
    samples: list[HeadSample] = []
    model = model_of(engine)
    assert model is not None
    limit = RateLimit(1e6, lambda: 0.0)
    recorder = HeadRecorder(model, top_k)
    engine.observed.observer = Collecting(
        collector=Collector(recorder, samples.append, limit, span, 0)
    )
    engine.generate(PROMPTS[:3], sampling)
    return samples


@pytest.mark.parametrize("method", METHODS_WITH_HEADS)
@pytest.mark.parametrize("sampling", [sampled(24), greedy(24)], ids=["sampled", "greedy"])
def test_a_sample_holds_what_the_target_computed_at_its_tokens(
    method: str, sampling: Sampling
) -> None:
    """Hidden states, embeddings and distributions are those of a forward pass over the output, at
    one and the same stretch of it; those of a neighbouring stretch differ."""
    engine = headed(method)
    head = tiny_head(engine.target, D)
    outputs = [
        (*result.prompt_ids, *result.token_ids)
        for result in headed(method).generate(PROMPTS[:3], sampling)
    ]
    samples = collected(engine, D, sampling)
    table_VH = engine.target.module.get_input_embeddings().weight
    assert len(samples) > 2
    for sample in samples:
        T = len(sample.ids_TK)
        found = []
        for output in outputs:
            hidden_TF = hidden_states(engine.target, output, head.target_layers).bfloat16()
            for first in range(len(output) - T + 1):
                if torch.allclose(hidden_TF[first : first + T], sample.hidden_TF, 0.02, 0.02):
                    found.append((output, first))
        assert len(found) == 1
        (output, first) = found[0]
        tokens_T = torch.tensor(output[first : first + T])
        assert torch.equal(sample.embedded_TH, table_VH[tokens_T].bfloat16())
        log_p_TV = full_logits(engine.target.module, output).log_softmax(-1)[first : first + T]
        log_p_TD = log_p_TV[:, head.vocabulary.target_ids_D]
        torch.testing.assert_close(sample.log_mass_T, log_p_TD.logsumexp(-1), atol=1e-4, rtol=1e-4)
        wanted_TD = log_p_TD.log_softmax(-1).gather(1, sample.ids_TK.long())
        torch.testing.assert_close(sample.log_p_TK, wanted_TD, atol=1e-4, rtol=1e-4)


def test_stretches_follow_each_other_without_a_gap() -> None:
    """Bonus tokens are recorded, too: all of an output but the prompt and the last token."""
    engine = headed()
    samples = collected(engine, 5, sampled(40), span=10)
    assert sum(len(sample.ids_TK) for sample in samples) == pytest.approx(3 * 40, abs=3)


@pytest.mark.parametrize(
    ("positions", "run"),
    [
        ([4, 5, 6], range(3)),
        ([4, 6, 7, 8, 10], range(1, 4)),
        ([1, 2, 9], range(2)),
        ([7], range(1)),
    ],
)
def test_the_longest_run_of_positions(positions: list[int], run: range) -> None:
    assert longest_run(positions) == run


# ------------------------------------------------------------------------------ what is learned


def sample_of(target: HFModel, head: Eagle3Head, tokens: list[int]) -> HeadSample:
    """The sample of a whole sequence, with all draft tokens, in float32."""
    log_p_TV = full_logits(target.module, tokens).log_softmax(-1)
    log_p_TD = log_p_TV[:, head.vocabulary.target_ids_D]
    top = log_p_TD.log_softmax(-1).topk(D)
    embedded_TH = target.module.get_input_embeddings().weight.detach()[torch.tensor(tokens)]
    hidden_TF = hidden_states(target, tokens, head.target_layers)
    ids_TK = top.indices.int()
    return HeadSample(embedded_TH, hidden_TF, ids_TK, top.values, log_p_TD.logsumexp(-1), D)


def test_a_student_compares_each_draft_step_with_the_target_after_the_same_tokens() -> None:
    """Step i at the last slot that it has: the head drafts i tokens after the others, and the
    target's distribution is that after the last of them. All values are those of an independent
    network; those of the slot before differ."""
    target = target_of(V)
    head = tiny_head(target, D)
    tokens = ragged_prompts([10], V, seed=4)[0]
    sample = sample_of(target, head, tokens)
    student = HeadStudent(head.network.float())
    log_p_TV = full_logits(target.module, tokens).log_softmax(-1)
    compared = list(student.compare(sample))
    assert [each.weight for each in compared] == pytest.approx([1, 0.8, 0.64])
    for i, each in enumerate(compared):
        known = len(tokens) - i
        logits_NV = reference_logits(head, target, tokens[:known], tokens[known:])
        ids_K = head.vocabulary.target_ids_D[sample.ids_TK[-1].long()]
        wanted_K = logits_NV[-1].log_softmax(-1)[ids_K]
        torch.testing.assert_close(each.log_q_PC[-1], wanted_K, atol=1e-4, rtol=1e-4)
        teacher_K = (each.log_p_PC + each.log_mass_P[:, None])[-1]
        torch.testing.assert_close(teacher_K, log_p_TV[-1][ids_K], atol=1e-4, rtol=1e-4)
        assert len(each.log_p_PC) == len(tokens) - 1 - i
        assert not torch.allclose(each.log_q_PC[-2], wanted_K, atol=1e-2), "it must be able to fail"


@pytest.mark.parametrize("method", METHODS_WITH_HEADS)
def test_acceptance_rises_and_greedy_outputs_stay(method: str) -> None:
    wanted = token_ids(engine_of(target_of(V)).generate(PROMPTS, greedy(24)))
    engine = headed(method)
    with engine.adapt(settings=LEARNS) as adaptation:
        alphas = traffic(engine, adaptation, 5)
        assert token_ids(engine.generate(PROMPTS, greedy(24))) == wanted
        state = adaptation.state
    assert alphas[-1] > 1.4 * alphas[0]
    assert state.status == "running"
    assert state.version >= 2
    assert token_ids(engine.generate(PROMPTS, greedy(24))) == wanted


def test_another_engine_with_the_same_head_keeps_its_weights() -> None:
    head = tiny_head(target_of(V), D)
    before = plain_weights(head.network)
    other, adapted = headed(head=head), headed(head=head)
    with adapted.adapt(settings=LEARNS) as adaptation:
        traffic(adapted, adaptation, 2)
        assert adaptation.state.version > 0
    for weights in (plain_weights(head.network), running(other)):
        assert all(torch.equal(x, before[name]) for name, x in weights.items())
    assert any(not torch.equal(x, before[name]) for name, x in running(adapted).items())


def test_versions_take_over_after_their_trials() -> None:
    engine = headed()
    with engine.adapt(settings=replace(LEARNS, trial_rounds=24)) as adaptation:
        alphas = traffic(engine, adaptation, 5)
        state = adaptation.state
    assert alphas[-1] > alphas[0] + 0.03
    assert any(version.alpha_before is not None for version in state.versions if version.number)


def test_the_saved_head_drafts_as_the_adapted_one(tmp_path: Path) -> None:
    engine = headed()
    with engine.adapt(settings=LEARNS) as adaptation:
        traffic(engine, adaptation, 2)
        wanted = engine.generate(PROMPTS, sampled(24))
        adaptation.save(tmp_path / "head")
    target = target_of(V)
    found = headed(head=load_eagle3(tmp_path / "head", target)).generate(PROMPTS, sampled(24))
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.alpha == pytest.approx(wanted.stats.alpha, abs=1e-6)


# ------------------------------------------------------------------------- outputs over swaps


@dataclass
class Swapping(Watching):
    """Exchanges the weights before every round, in turn."""

    weights: list[StagedWeights] = field(default_factory=list)
    num_swaps: int = 0

    def before_round(self) -> None:
        self.weights[self.num_swaps % len(self.weights)].write()
        self.num_swaps += 1


PROMPT, LENGTH, SMALL_V = [3, 1, 4, 1], 3, 5


def exact(target: HFModel) -> Tensor:
    """Probability of each continuation of LENGTH tokens, from plain forward passes, (S,)."""
    probs = []
    for new in product(range(SMALL_V), repeat=LENGTH):
        p_TV = full_logits(target.module, [*PROMPT, *new]).double().softmax(-1)
        first = len(PROMPT) - 1
        probs.append(torch.stack([p_TV[first + i, x] for i, x in enumerate(new)]).prod())
    return torch.stack(probs)


@pytest.mark.parametrize(
    ("method", "num_rows"),
    [
        ("eagle3", 3000),
        pytest.param("eagle3", 40_000, marks=pytest.mark.slow),
        pytest.param("eagle3-tree", 40_000, marks=pytest.mark.slow),
    ],
)
def test_sampled_outputs_have_the_targets_distribution_over_swaps(
    method: str, num_rows: int
) -> None:
    """Requests of three tokens, whose head's weights change before every round. A correct method
    fails with probability 1e-4 per case over the choice of the seed, which is fixed."""
    target = target_of(SMALL_V, std=0.4)
    heads = [tiny_head(target, 4, seed=seed) for seed in (1, 2, 3)]
    engine = Engine(
        target, heads[0], METHODS[method], num_speculative_tokens=2, max_batch_size=1000
    )
    model = model_of(engine)
    assert model is not None
    subject = HeadSubject(engine, model)
    subject.adopt()
    every = [subject.stage(plain_weights(head.network)) for head in heads]
    engine.observed.observer = observer = Swapping(weights=every)
    sampling = Sampling(max_new_tokens=LENGTH, ignore_eos=True)
    counts_S = torch.zeros(SMALL_V**LENGTH, dtype=torch.int64)
    for first in range(0, num_rows, 1000):
        numbers = range(first, first + 1000)
        results = engine.generate([PROMPT] * 1000, sampling, request_numbers=numbers)
        for tokens in token_ids(results):
            counts_S[sum(x * SMALL_V ** (LENGTH - 1 - i) for i, x in enumerate(tokens))] += 1
    assert observer.num_swaps >= num_rows // 1000 * 2
    assert chi2_p_value(counts_S, exact(target)) > 1e-4
    other = target_of(SMALL_V, std=0.4, seed=1)
    assert chi2_p_value(counts_S, exact(other)) < 1e-4, "it must be able to fail"


# -------------------------------------------------------------------------------- interruptions


@pytest.mark.slow
def test_a_killed_trainer_disturbs_nobody(tmp_path: Path) -> None:
    """SIGKILL of the trainer's process: outputs stay, a warning names it, and it starts again."""
    wanted = token_ids(engine_of(target_of(V)).generate(PROMPTS, greedy(24)))
    engine = headed()
    settings = replace(LEARNS, where="process", batch_size=4)
    with engine.adapt(tmp_path, settings) as adaptation:
        traffic(engine, adaptation, 2)
        steps = adaptation.state.step
        assert steps > 0
        worker = adaptation._worker
        assert isinstance(worker, ProcessWorker)
        os.kill(worker.pid, signal.SIGKILL)
        with adaptation._condition:
            assert adaptation._condition.wait_for(lambda: adaptation._restarts, 60)
        with pytest.warns(OutriderWarning, match=r"crashed \(process \d+ ended with signal 9\)"):
            assert token_ids(engine.generate(PROMPTS, greedy(24))) == wanted
        traffic(engine, adaptation, 2)
        state = adaptation.state
    assert state.status == "running"
    assert state.restarts == 1
    assert state.step > steps


def adapt_until_killed(folder: Path) -> None:
    engine = headed()
    adaptation = engine.adapt(folder, LEARNS)
    while adaptation.flush(60):
        engine.generate(PROMPTS[:4], sampled(24))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.slow
def test_killed_at_any_moment_a_folder_is_resumed(tmp_path: Path) -> None:
    """SIGKILL of engine and trainer at twenty random moments: the folder always resumes with whole
    weights, and no step is lost that was saved."""
    rng = random.Random(3)
    steps = 0
    for _ in range(20):
        process = get_context("fork").Process(target=adapt_until_killed, args=(tmp_path,))
        process.start()
        process.join(rng.uniform(0.1, 1.2))
        process.kill()
        process.join()
        engine = headed()
        with engine.adapt(tmp_path, LEARNS) as adaptation:
            assert adaptation.flush(60)
            state = adaptation.state
            assert state.status == "running"
            assert state.step >= steps
            served = load_weights(version_path(tmp_path, state.version))
            assert all(torch.equal(x, served[name]) for name, x in running(engine).items())
        assert not list(tmp_path.rglob("*.partial"))
        steps = state.step


def test_a_folder_of_another_head_is_named(tmp_path: Path) -> None:
    headed().adapt(tmp_path, QUICK).stop()
    other = headed(head=tiny_head(target_of(V), D - 1))
    with pytest.raises(IncompatibleError, match=r"draft vocabulary 18.*, not .*vocabulary 17"):
        other.adapt(tmp_path, QUICK)


# ---------------------------------------------------------------------------- methods, engines


@pytest.mark.parametrize("method", ["medusa-lossless", "dflash", "dspark"])
def test_other_heads_are_not_adapted(method: str) -> None:
    target = target_of(V)
    with pytest.raises(IncompatibleError, match=f"{method!r} has a head of kind .* not adapted"):
        engine_of(target, None, method).adapt(settings=QUICK)


def test_heads_are_among_the_methods_that_are_adapted() -> None:
    assert set(METHODS_WITH_HEADS) <= set(adaptable_methods())


def test_an_engine_of_another_method_drafts_with_the_adapted_head() -> None:
    engine = headed()
    before = running(engine)
    with engine.adapt(settings=LEARNS) as adaptation:
        traffic(engine, adaptation, 2)
    after = running(engine.with_method(METHODS["eagle3-tree"]))
    assert all(torch.equal(x, running(engine)[name]) for name, x in after.items())
    assert any(not torch.equal(x, before[name]) for name, x in after.items())
