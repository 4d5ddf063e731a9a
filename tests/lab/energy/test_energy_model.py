"""The two-term model: counted bytes and operations against closed forms and torch's own count."""

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module
from torch.utils.flop_counter import FlopCounterMode

from outrider.lab.energy.model import CPU, GPU, ModelMeter, TwoTermModel
from outrider.lab.energy.passes import PassCounter, Work
from outrider.lab.profile.floor import weight_bytes
from outrider.runtime import HFModel, runner
from outrider.runtime.prefill import unsampled_context

UNIT = TwoTermModel(2.0, 1.0, 3.0, 1.0, "a test")


def test_energy_by_hand() -> None:
    """3 W · 5 bytes / (2 bytes/s) and 7 W · 11 operations / (10 operations/s)."""
    model = TwoTermModel(3, 2, 7, 10, "a test")
    assert model.joules(Work(1, 5, 11)) == pytest.approx((7.5, 7.7))


def test_the_constants_are_those_of_their_sources() -> None:
    assert CPU.memory_watts / CPU.bandwidth == pytest.approx(160e-12)
    assert CPU.compute_watts / CPU.rate == pytest.approx(280 / 3.5e12)
    assert GPU.memory_watts / GPU.bandwidth == pytest.approx(32e-12, rel=0.01)
    assert GPU.compute_watts / GPU.rate == pytest.approx(400 / 312e12)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "mistral"])
def test_operations_are_those_that_torch_counts(family: str) -> None:
    """Of a pass over one token after 5: matrix products, and attention to 6 tokens."""
    module = tiny_module(family, attn_implementation="eager")  # torch counts no CPU kernel of SDPA
    model = HFModel(module)
    context = unsampled_context(model, list(range(1, 7)))
    with torch.inference_mode():
        cache = model.start(context)
        counter = PassCounter()
        with FlopCounterMode(display=False) as flops, counter.counting():
            model.extend(cache, context.root_B[:, None])
    (work,) = counter.work().values()
    assert work.operations == pytest.approx(flops.get_total_flops(), rel=1e-6)


def test_bytes_by_hand() -> None:
    """Weights once, and the keys and values of two rows with 6 tokens each: 2 layers of 2 heads of
    8 numbers, twice, in float32."""
    model = tiny()
    context = unsampled_context(model, list(range(1, 7)), rows=2)
    with torch.inference_mode():
        cache = model.start(context)
        counter = PassCounter()
        with counter.counting():
            model.extend(cache, context.root_B[:, None])
    (work,) = counter.work().values()
    assert work.passes == 1
    assert work.num_bytes == weight_bytes(model.module, 2) + 2 * 6 * (2 * 2 * 8 * 2 * 4)


def test_experts_count_as_a_token_uses_them() -> None:
    """Two of four experts: their operations are half of what all four would be."""
    few, all_of_them = (
        HFModel(tiny_module("mixtral", num_experts_per_tok=used)) for used in (2, 4)
    )
    found = []
    for model in (few, all_of_them):
        context = unsampled_context(model, [1, 2])
        with torch.inference_mode():
            cache = model.start(context)
            counter = PassCounter()
            with counter.counting():
                model.extend(cache, context.root_B[:, None])
        found.append(counter.work()["model"].operations)
    experts = 2 * 2 * 3 * 32 * 48  # two experts, per layer: three matrices
    assert found[1] - found[0] == pytest.approx(2 * 2 * experts / 2)


def test_a_run_counts_the_passes_of_target_and_draft() -> None:
    engine = engine_of(tiny(name="target"), tiny(seed=1, name="draft"))
    meter = ModelMeter(UNIT)
    meter.begin()
    (result,) = engine.generate(ragged_prompts([5]), greedy(12))
    reading = meter.end()
    work = reading["work"]
    assert work["target"]["passes"] == result.stats.rounds + 1  # and the prefill
    assert work["draft"]["passes"] >= result.stats.drafted
    assert reading["estimate"] is True
    assert "estimate" in reading["source"]
    assert reading["constants"]["source"] == "a test"
    total = [sum(each[name] for each in work.values()) for name in ("num_bytes", "operations")]
    assert reading["joules"] == pytest.approx(2 * total[0] + 3 * total[1])


def test_what_runs_outside_a_measurement_is_not_counted() -> None:
    """The functions of the runner are restored, also when a run raises."""
    before = runner.forward, runner.fused_draft
    engine = engine_of(tiny())
    meter = ModelMeter(UNIT)
    meter.begin()
    empty = meter.end()
    assert empty["joules"] == 0
    assert (runner.forward, runner.fused_draft) == before
    engine.generate([[1, 2]], greedy(4))
    meter.begin()
    assert meter.end()["joules"] == 0
    counter = PassCounter()
    with pytest.raises(ZeroDivisionError), counter.counting():
        1 / 0  # noqa: B018
    assert (runner.forward, runner.fused_draft) == before


def test_fewer_target_passes_are_less_energy() -> None:
    """The same model as its own draft: the target reads its weights once for several tokens, and a
    model without weights to speak of would draft for nothing."""
    target = tiny(name="target")
    readings = []
    for engine in (engine_of(target), engine_of(target, target, γ=4)):
        meter = ModelMeter(UNIT)
        meter.begin()
        engine.generate(ragged_prompts([5]), greedy(20))
        readings.append(meter.end()["work"]["target"])
    assert readings[1]["num_bytes"] < 0.5 * readings[0]["num_bytes"]
