"""``outrider plan``: which sharding, which γ, and when speculation stops paying."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.errors import fail
from outrider.cli.options.output import AsJson
from outrider.cli.options.plan import Demand, Hardware, PlannedModels, Simulation
from outrider.cli.progress import Progress
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab.plan import Accelerator, Option, Plan, Question

ALPHA = 0.7
"""α where none was given."""
_RATE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*(rps|/s|rpm|/min)?", re.IGNORECASE)


def plan(
    *,
    models: PlannedModels,
    hardware: Hardware,
    demand: Demand,
    simulation: Simulation,
    as_json: AsJson = False,
) -> None:
    """Plan a deployment: tensor parallelism, replicas, draft lengths, and when drafts stop paying.

    From sizes, hardware and load alone; no model is loaded and no GPU is needed:

      outrider plan --target 70B --draft 1B --gpus 8 --load 5rps

    With α and times of passes as they were measured, for GPUs by their numbers:

      outrider plan --target big/ --draft small/ --alpha results/ \\
        --passes profile.json --gpu mine --memory 80 --bandwidth 3000 \\
        --tflops 900 --link-bandwidth 400 --gpus 4 --load 20rps

    A simulated day with a load that follows the hours, and with failures:

      outrider plan --target 8B --draft 1B --gpus 64 --load 100rps \\
        --simulate 24 --swing 0.5 --mean-hours-to-failure 1000

    docs/plan.md derives the cost model and lists its assumptions.
    """
    start("outrider.lab.plan")
    from outrider.lab.plan import plan as planned

    question, alpha_source = _question(models, hardware, demand)
    found = planned(question)
    assumed = (f"α is {question.alpha:.3g}: {alpha_source}.", *found.assumptions)
    found = replace(found, assumptions=assumed if models.draft else found.assumptions)
    simulated = _simulated(found, simulation) if simulation.simulate else {}
    if as_json:
        document = found.as_dict() | ({"simulated": simulated} if simulated else {})
        typer.echo(json.dumps(_finite(document), ensure_ascii=False))
        return
    from outrider.cli.plan_table import show

    show(found, simulated)


def _question(models: PlannedModels, hardware: Hardware, demand: Demand) -> "tuple[Question, str]":
    """What is asked, and where its α comes from."""
    from outrider.lab.plan import Question, Workload, model_size

    for flag, bits in (
        ("--bits", models.bits),
        ("--draft-bits", models.draft_bits),
        ("--kv-bits", models.kv_bits),
    ):
        if bits is not None and not bits > 0:
            raise fail(f"{flag} {bits:g}: must be above 0")
    draft_bits = models.bits if models.draft_bits is None else models.draft_bits
    kv_bytes = models.kv_bits / 8
    target = model_size(models.target, models.bits / 8, kv_bytes)
    draft = None
    if models.draft is not None:
        draft = model_size(models.draft, draft_bits / 8, kv_bytes)
    alpha, source = _alpha(models.alpha)
    passes = None
    if models.passes is not None:
        from outrider.lab.plan.measured import measured_passes

        passes = dict(measured_passes(models.passes))
    question = Question(
        target,
        draft,
        _accelerator(hardware),
        hardware.gpus,
        Workload(_rate(demand.load), demand.prompt_tokens, demand.output_tokens),
        alpha,
        demand.max_gamma,
        demand.max_batch,
        hardware.gpus_per_server,
        demand.max_per_token,
        passes,
        _roofline(hardware),
    )
    return question, source


def _accelerator(hardware: Hardware) -> "Accelerator":
    """The GPU, from the options' units."""
    from outrider.lab.plan import accelerator

    scales = {
        "memory": (hardware.memory, 1e9),
        "bandwidth": (hardware.bandwidth, 1e9),
        "flops": (hardware.tflops, 1e12),
        "link_bandwidth": (hardware.link_bandwidth, 1e9),
        "link_latency": (hardware.link_latency, 1e-6),
    }
    numbers = {name: None if x is None else x * scale for name, (x, scale) in scales.items()}
    return accelerator(hardware.gpu, **numbers)


def _roofline(hardware: Hardware) -> dict[str, Any]:
    """The values that replace assumptions."""
    found: dict[str, Any] = {}
    for name in ("bandwidth_reached", "flops_reached"):
        share = getattr(hardware, name)
        if share is None:
            continue
        if not 0 < share <= 1:
            raise fail(f"--{name.replace('_', '-')} {share:g}: must be above 0 and at most 1")
        found[name] = share
    if hardware.layer_time is not None:
        if not hardware.layer_time >= 0:
            raise fail(f"--layer-time {hardware.layer_time:g}: must be 0 or more")
        found["layer_seconds"] = hardware.layer_time * 1e-6
    return found


def _rate(text: str) -> float:
    """Requests per second."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise fail(f"--load {text}: must be a rate above 0, such as 50rps or 3000rpm")
    unit = (match[2] or "rps").lower()
    return float(match[1]) / (60 if unit in ("rpm", "/min") else 1)


def _alpha(text: str | None) -> tuple[float, str]:
    """α, and where it comes from."""
    if text is None:
        return ALPHA, "an assumption; measure it by outrider bench, and pass --alpha"
    try:
        return float(text), "as given"
    except ValueError:
        pass
    path = Path(text).expanduser()
    if not path.exists():
        raise fail(f"--alpha {text}: must be a number from 0 to 1, or what outrider bench wrote")
    from outrider.lab.plan.measured import measured_alpha

    return measured_alpha(path)


def _simulated(found: "Plan", simulation: Simulation) -> dict[str, Any]:
    """The plan and plain decoding, simulated with the same arrivals."""
    options = {"plan": found.best}
    if found.best.draft_on != "none":
        options["plain decoding"] = found.plain
    with Progress() as progress:
        results = {}
        for name, option in options.items():
            what = f"simulating {option.replicas} replicas, {name}"
            progress.show(what)
            results[name] = _simulate(
                found.question,
                option,
                simulation,
                partial(_show_hour, progress, what),
            )
    return results


def _show_hour(progress: Progress, what: str, seconds: float) -> None:
    progress.show(f"{what}: hour {seconds / 3600:.0f}")


def _simulate(
    question: "Question",
    option: "Option",
    simulation: Simulation,
    progress: Callable[[float], None],
) -> dict[str, Any]:
    from outrider.lab.plan import Fleet, Traffic, simulate

    replica, hours = option.replica, simulation.mean_hours_to_failure
    failures: dict[str, Any] = {} if hours is None else {"mean_time_to_failure": hours * 3600}
    fleet = Fleet(
        option.replicas,
        replica.row_rates,
        replica.prefill_seconds,
        replica.rounds,
        repair_seconds=simulation.repair_minutes * 60,
        **failures,
    )
    work = question.workload
    traffic = Traffic(work.load, work.output_tokens, swing=simulation.swing)
    seconds = simulation.simulate * 3600
    return simulate(fleet, traffic, seconds, simulation.seed, progress=progress).as_dict()


def _finite(value: Any) -> Any:
    """JSON has no NaN: a time that nothing was measured of is null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if value != value else value
