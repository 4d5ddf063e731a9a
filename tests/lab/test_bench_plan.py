"""Plans: methods as text, TOML files, what runs with what, and every error."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_bench import tiny_plan

from outrider.core.errors import IncompatibleError, InvalidParameterError, UnknownMethodError
from outrider.lab.bench import DataSpec, MethodSpec, plan_of, read_plan


def test_methods_as_text() -> None:
    spec = MethodSpec.parse("mjsd:beams=8,threshold=0.1")
    assert (spec.name, spec.options) == ("mjsd", {"beams": 8, "tau": 0.1})
    assert str(spec) == "mjsd:beams=8,tau=0.1"
    assert MethodSpec.parse(str(spec)) == spec
    assert MethodSpec.parse("plain") == MethodSpec("plain")


def test_values_may_contain_commas() -> None:
    spec = MethodSpec.parse("sequoia:topology=3,2,1,gamma=3")
    assert (str(spec.options["topology"]), spec.gamma) == (str(_topology("3,2,1")), 3)
    spec = MethodSpec.parse("speculative:draft_length=survival:0.3,draft=models/a,label=short")
    assert (spec.draft_length, spec.draft, spec.title) == ("survival:0.3", "models/a", "short")
    assert str(spec) == "speculative:draft=models/a,draft_length=survival:0.3"


def _topology(text: str) -> Any:
    return MethodSpec.parse(f"sequoia:topology={text}").options["topology"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("speculativ", UnknownMethodError, "did you mean 'speculative'"),
        ("mjsd:beam=8", InvalidParameterError, "did you mean 'beams'"),
        ("mjsd:beams=many", InvalidParameterError, "beams='many': must be a whole number"),
        ("mjsd:beams", InvalidParameterError, "write NAME:OPTION=VALUE"),
        ("speculative:gamma=65", InvalidParameterError, "from 1 to 64"),
        ("plain:budget=1", InvalidParameterError, "has no options"),
    ],
)
def test_bad_methods(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MethodSpec.parse(text)


def test_lossless_depends_on_the_temperature() -> None:
    assert MethodSpec.parse("speculative").lossless_at(0.7)
    assert not MethodSpec.parse("mentored").lossless_at(0.7)
    assert MethodSpec.parse("mentored").lossless_at(0)  # the target's argmax
    assert not MethodSpec.parse("mjgd").lossless_at(0)


TOML = """
target = "big"
drafts = ["./small", "hub/id"]
methods = [
  "mentored:budget=0.2",
  { name = "speculative", gamma = 4, label = "four" },
  { name = "mjsd", options = { beams = 4 } },
]
gammas = [3, 5]
temperatures = [0.8, 1]
batch_sizes = 4
data = ["builtin:code", { source = "../data/q.jsonl", tasks = "qa", limit = 8, prompts = "text" }]
"""


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOML)
    plan = plan_of(read_plan(file))
    assert [str(each) for each in plan.methods] == [
        "mentored:budget=0.2",
        "speculative:gamma=4",
        "mjsd:beams=4",
    ]
    assert [each.title for each in plan.all_methods][:3] == ["plain", "mentored:budget=0.2", "four"]
    assert plan.drafts == (str(tmp_path / "small"), "hub/id")
    assert (plan.temperatures, plan.batch_sizes) == ((0.8, 1.0), (4,))
    assert plan.data[1] == DataSpec(str(tmp_path / "../data/q.jsonl"), "", ("qa",), 8, "text")
    assert plan.gammas_of(plan.methods[1]) == (4,)
    assert plan.gammas_of(plan.methods[0]) == (3, 5)
    assert plan.gammas_of(plan.baseline) == (None,)
    assert plan.drafts_of(plan.methods[0]) == plan.drafts
    assert plan.drafts_of(plan.baseline) == (None,)
    assert json.loads(json.dumps(plan.as_dict()))["methods"][1] == {
        "method": "speculative:gamma=4",
        "label": "four",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", r"plan .*Invalid value"),
        (b"\xff", r"cannot read plan"),
        (None, "No such file"),
    ],
)
def test_bad_toml(tmp_path: Path, text: Any, message: str) -> None:
    file = tmp_path / "plan.toml"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidParameterError, match=message):
        read_plan(file)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"gama": 3}, InvalidParameterError, "unknown setting 'gama'; did you mean 'gammas'"),
        ({"methods": []}, InvalidParameterError, "methods: the plan has none"),
        ({"methods": [5]}, InvalidParameterError, "methods=5: must be such as"),
        ({"data": []}, InvalidParameterError, "data: the plan has none"),
        ({"data": [{"file": "x"}]}, InvalidParameterError, "must be a file, builtin:NAME"),
        ({"data": [{"source": "x", "task": "y"}]}, InvalidParameterError, "unknown setting 'task'"),
        ({"data": [{"source": "x", "limit": 0}]}, InvalidParameterError, "limit=0"),
        ({"data": [{"source": "x", "prompts": "y"}]}, InvalidParameterError, "prompts='y'"),
        ({"gammas": [0]}, InvalidParameterError, "gammas=0"),
        ({"temperatures": [-1]}, InvalidParameterError, "temperature=-1"),
        ({"temperatures": ["hot"]}, InvalidParameterError, "temperatures='hot'"),
        ({"top_p": 0}, InvalidParameterError, "top_p=0"),
        ({"batch_sizes": [0]}, InvalidParameterError, "batch_sizes=0"),
        ({"repeats": 0}, InvalidParameterError, "repeats=0: must be a whole number from 1"),
        ({"repeats": 4}, InvalidParameterError, "max_repeats=2: must be at least repeats=4"),
        ({"warmup": -1}, InvalidParameterError, "warmup=-1"),
        ({"threads": 0}, InvalidParameterError, "threads=0"),
        ({"max_new_tokens": 0}, InvalidParameterError, "max_new_tokens=0"),
        ({"compile": "fast"}, InvalidParameterError, "compile='fast'"),
        ({"gammas": [3, 3]}, InvalidParameterError, "gammas: 3 is there twice"),
        ({"methods": ["block", "block"]}, InvalidParameterError, "methods: block is there twice"),
        (
            {"methods": ["mjgd"], "temperatures": [0, 0.5]},
            IncompatibleError,
            "'mjgd' is defined at temperature 0 only, and the plan has temperature 0.5",
        ),
        ({"drafts": []}, IncompatibleError, "'speculative' needs a draft model"),
        ({"methods": ["eagle3"], "drafts": []}, IncompatibleError, "needs a head of kind 'eagle3'"),
        (
            {"baseline": "speculative", "gammas": [2, 3]},
            InvalidParameterError,
            "several draft lengths or drafts in this plan; set its own",
        ),
    ],
)
def test_bad_plans(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_plan(**values)


def test_the_embedded_target_has_a_draft() -> None:
    plan = plan_of({"methods": "speculative", "data": "builtin:code"})
    assert plan.drafts_of(plan.methods[0]) == ("embedded",)
