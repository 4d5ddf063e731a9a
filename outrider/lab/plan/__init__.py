"""Capacity planning on paper: which sharding, which γ, and when speculation stops paying.

``search.py`` compares the ways to divide GPUs among replicas by a cost model; ``simulate.py``
replays the same round times with random arrivals, a load that follows the day, and failures.
``measured.py`` reads α and times of passes from what the other commands have measured.
"""

from outrider.lab.plan.fleet import Fleet, Traffic
from outrider.lab.plan.hardware import ACCELERATORS, Accelerator, accelerator
from outrider.lab.plan.model_size import ModelSize, model_size
from outrider.lab.plan.passes import MeasuredPasses, Passes, RooflinePasses
from outrider.lab.plan.replica import Replica, Workload
from outrider.lab.plan.search import Option, Plan, Question, plan
from outrider.lab.plan.simulate import simulate
from outrider.lab.plan.simulated import Simulated

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Fleet",
    "MeasuredPasses",
    "ModelSize",
    "Option",
    "Passes",
    "Plan",
    "Question",
    "Replica",
    "RooflinePasses",
    "Simulated",
    "Traffic",
    "Workload",
    "accelerator",
    "model_size",
    "plan",
    "simulate",
]
