"""``outrider.toml``: written and read again, found to be stale, exported for other engines."""

import json
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from simulated_machine import SimulatedMachine

from outrider import Sampling
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.chain.length_table import LengthTable
from outrider.lab.model_files import fingerprint, same_model
from outrider.lab.tune.configuration import (
    Choice,
    Configuration,
    as_toml,
    configuration_of,
    read_configuration,
    write_configuration,
)
from outrider.lab.tune.export import EXPORTS, export
from outrider.lab.tune.machine import Source
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings

SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=1.0)
TABLE = LengthTable(((1, 4, 6), (5, 16, 3), (17, 64, 0)))
FULL = Configuration(
    "embedded",
    Choice("speculative", {}, "embedded", TABLE),
    ((1, 1, Choice("prompt-lookup", {"prompt_lookup_max": "4"}, None, LengthTable(((1, 1, 5),)))),),
    {"dtype": "bfloat16", "compile": "auto", "exact": True},
    {"target": "0123", "draft embedded": "4567", "hardware": 'an "odd" name, \\ € \t'},
    ({"batch_size": 1, "ratio": 2.5, "low": 2.0, "source": "the draft"},),
    0.8,
    {"top_p": 0.9},
)


def model_in(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


# ------------------------------------------------------------------------------------------ files


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    write_configuration(FULL, file)
    assert read_configuration(file) == replace(FULL, path=file)
    assert [each.name for each in tmp_path.iterdir()] == ["outrider.toml"]


def test_the_file_is_in_vllms_form() -> None:
    values = tomllib.loads(as_toml(FULL))
    assert values["num_speculative_tokens_per_batch_size"] == [[1, 4, 6], [5, 16, 3], [17, 64, 0]]
    assert (values["target"], values["draft"], values["method"]) == (
        "embedded",
        "embedded",
        "speculative",
    )
    assert values["at_batch_size"][0]["options"] == {"prompt_lookup_max": "4"}


def test_numbers_of_any_kind_are_toml() -> None:
    numbers = {"a": 1.0, "b": 1e-9, "c": 123456789.25, "d": 7, "e": None, "f": [1, 2], "g": False}
    values = tomllib.loads(as_toml(replace(FULL, measured=(numbers,))))["measured"][0]
    assert values == {"a": 1.0, "b": 1e-9, "c": 1.23457e8, "d": 7, "f": [1, 2], "g": False}


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(
        'target = "./big"\ndraft = "../small"\nmethod = "ngram"\noptions = { file = "./t.ngram" }\n'
        '[fingerprints]\n"draft ../small" = "5"\n'
    )
    found = read_configuration(file)
    assert found.target == str(tmp_path / "big")
    assert found.choice.draft == str(tmp_path / ".." / "small")
    assert found.choice.options == {"file": str(tmp_path / "t.ngram")}
    assert found.fingerprints == {f"draft {tmp_path / '..' / 'small'}": "5"}


def test_relative_paths_are_written_as_seen_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration for another folder than the working directory names the same models."""
    monkeypatch.chdir(tmp_path)
    for name in ("big", "small", "conf"):
        model_in(tmp_path / name)
    choice = Choice("ngram", {"file": "./small/config.json", "match": "big"}, "small/", TABLE)
    prints = {"target": fingerprint("./big", "target"), "draft small/": "5"}
    for file in (Path("conf/outrider.toml"), Path("outrider.toml")):
        write_configuration(Configuration("./big", choice, ((1, 1, choice),), {}, prints), file)
        for folder in (tmp_path, tmp_path / "small"):
            monkeypatch.chdir(folder)
            found = read_configuration(tmp_path / file)
            assert same_model(found.target, str(tmp_path / "big"))
            assert same_model(found.choice.draft, str(tmp_path / "small"))
            assert same_model(found.choice.options["file"], str(tmp_path / "small/config.json"))
            assert found.choice.options["match"] == "big"
            assert found.at_batch_size[0][2] == found.choice
            assert found.fingerprints[f"draft {found.choice.draft}"] == "5"
            assert found.stale(Choice("plain"), "")[0].startswith("it was measured on")
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("target = ", "configuration .*: Invalid value"),
        ('method = "plain"', "has no target: write it with `outrider tune"),
        ('target = "a"', "has no method"),
        ('target = 3\nmethod = "plain"', "target = 3: must be a text"),
        ('target = "a"\nmethod = "plain"\nsettings = 3', "settings = 3: must be a table"),
        (
            'target = "a"\nmethod = "plain"\ntuned_at_temperature = "hot"',
            "tuned_at_temperature = 'hot': must be a number",
        ),
        (
            'target = "a"\nmethod = "plain"\ntuned_with_truncation = { top_q = 1 }',
            "must be of top_k, top_p, min_p, not top_q",
        ),
        (
            'target = "a"\nmethod = "s"\nnum_speculative_tokens_per_batch_size = [[2, 3, 4]]',
            "must begin at 1",
        ),
        (
            'target = "a"\nmethod = "s"\n[[at_batch_size]]\nmethod = "t"\nbatch_sizes = [1]',
            "a first and a last batch size",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    with pytest.raises(InvalidParameterError, match=problem):
        read_configuration(file)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cannot read configuration"):
        read_configuration(tmp_path / "missing.toml")
    with pytest.raises(InvalidParameterError, match="cannot write configuration"):
        write_configuration(FULL, tmp_path / "missing" / "outrider.toml")


# ------------------------------------------------------------------------------------------ stale


def test_a_stale_configuration_says_what_differs(tmp_path: Path) -> None:
    target, draft = model_in(tmp_path / "target"), model_in(tmp_path / "draft", b"small")
    choice = Choice("speculative", {}, draft, TABLE)
    prints = {
        "target": fingerprint(target, "target"),
        f"draft {draft}": fingerprint(draft, "draft"),
        "hardware": "this processor",
    }
    made = Configuration(target, choice, fingerprints=prints)
    assert made.stale(choice, "this processor") == []
    assert made.stale(choice, "another") == ["it was measured on this processor, this is another"]
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"other")
    assert made.stale(choice, "this processor") == [
        f"the weights of draft {draft} are not those that were measured"
    ]
    (tmp_path / "target" / "config.json").write_text('{"layers": 2}')
    assert len(made.stale(choice, "another")) == 3
    assert (
        replace(made, fingerprints={})
        .stale(Choice("plain"), "x")[1]
        .startswith("it was measured on unknown hardware")
    )


# ------------------------------------------------------------------------------------ temperature

LOSSY = Choice("mentored", {"budget": "0.2"}, "embedded")


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        (Sampling(temperature=0.8), None),
        (Sampling(temperature=0.8, top_p=0.9, top_k=0), None),
        (Sampling(temperature=0), None),  # where mentored sampling is greedy verification
        (
            Sampling(temperature=1.0),
            "tuned at temperature 0.8 with top_p 0.9; how much its output diverges from the target "
            "at 1 with top_p 0.9 was",
        ),
        (Sampling(temperature=0.8, top_p=1.0), "from the target at 0.8 was not measured"),
        (Sampling(temperature=0.8, top_k=5), "target at 0.8 with top_p 0.9 and top_k 5 was not"),
        (None, "diverges from the target at others"),
    ],
)
def test_the_divergence_of_a_lossy_method_is_known_at_one_temperature_and_truncation(
    sampling: Sampling | None, problem: str | None
) -> None:
    found = replace(FULL, choice=LOSSY).unmeasured_divergence(LOSSY, sampling)
    assert (found is None) is (problem is None)
    assert problem is None or problem in (found or "")


def test_the_temperature_of_an_older_file_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    write_configuration(replace(FULL, temperature=None, truncation={}), file)
    older = read_configuration(file)
    assert older.temperature is None
    found = older.unmeasured_divergence(LOSSY, Sampling(temperature=0.8))
    assert "tuned at an unknown temperature" in (found or "")
    assert older.unmeasured_divergence(LOSSY, None) is not None


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0, None])
def test_a_lossless_method_does_not_diverge_at_any_temperature(temperature: float | None) -> None:
    sampling = None if temperature is None else Sampling(temperature=temperature)
    assert FULL.unmeasured_divergence(FULL.choice, sampling) is None


# ------------------------------------------------------------------------------------ of a tuning


def test_a_tuning_with_two_sources_becomes_a_configuration() -> None:
    """The overall method is the one with the larger gains; the other has a table of its own."""
    machine = SimulatedMachine(
        {"head": [0.9] * 8, "copies": [0.5] * 8},
        {"head": lambda rows: 0.001 + 0.006 * (rows - 1), "copies": lambda rows: 0.0},
        lambda rows, width: 0.02 + 0.002 * max(0, rows * width - 24),
        num_prompts=16,
    )
    sources = [
        Source("head", "speculative", "embedded"),
        Source("copies", "prompt-lookup:prompt_lookup_max=4"),
    ]
    tuning = Tuner(machine, sources, TuneSettings((1, 4, 64), 60)).run()
    made = configuration_of(tuning, "embedded", {"compile": "auto"}, "this processor", SAMPLING)
    assert made.choice.method == "speculative"
    assert made.choice.lengths is not None
    assert (made.temperature, made.truncation) == (0.8, {"top_k": 40})
    assert made.choice.lengths.length(1) > 2
    assert made.choice.lengths.length(64) == 0
    assert [(first, last) for first, last, _ in made.at_batch_size] == [(2, 4)]
    other = made.choice_at(3)
    assert (other.method, other.options) == ("prompt-lookup", {"prompt_lookup_max": "4"})
    assert made.choice_at(1) == made.choice_at(None) == made.choice_at(64) == made.choice
    assert made.stale(made.choice, "this processor") == []
    assert set(made.fingerprints) == {"hardware", "target", "draft embedded"}
    assert [each["batch_size"] for each in made.measured] == [1, 4, 64]
    assert made.temperature == 0.8
    tomllib.loads(as_toml(made))


# ---------------------------------------------------------------------------------------- exports


def of(method: str, lengths: LengthTable = TABLE, draft: str | None = None, **options: str) -> Any:
    return Configuration("big", Choice(method, options, draft, lengths))


def test_vllms_configuration() -> None:
    """By the rules of vLLM: ranges that begin at 1 and do not overlap, no K above the maximum."""
    values = json.loads(export(of("eagle3", draft="head/"), "vllm"))
    assert values == {
        "method": "eagle3",
        "model": "head/",
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 4, 6], [5, 16, 3], [17, 64, 0]],
        "draft_sample_method": "probabilistic",
    }
    ranges = values["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert all(after[0] > before[1] for before, after in pairwise(ranges))
    assert max(k for _, _, k in ranges) == values["num_speculative_tokens"]
    block = json.loads(export(of("block", draft="small/"), "vllm"))
    assert (block["method"], block["rejection_sample_method"]) == ("draft_model", "block")
    lookup = json.loads(export(of("prompt-lookup", prompt_lookup_max="4"), "vllm"))
    assert (lookup["method"], lookup["prompt_lookup_max"]) == ("ngram", 4)
    suffix = json.loads(export(of("suffix", corpus_tokens="0", factor="1.5"), "vllm"))
    assert suffix["suffix_decoding_max_cached_requests"] == 0
    assert suffix["suffix_decoding_max_spec_factor"] == 1.5
    assert export(of("plain", LengthTable(((1, 4, 0),))), "vllm") == "null"


def test_transformers_arguments() -> None:
    assert export(of("speculative", draft="small/"), "transformers") == (
        "assistant_model=AutoModelForCausalLM.from_pretrained('small/'), num_assistant_tokens=6, "
        "num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0"
    )
    assert export(of("prompt-lookup"), "transformers") == (
        "prompt_lookup_num_tokens=6, max_matching_ngram_size=3"
    )
    assert "assistant_early_exit=4" in export(of("early-exit", layer="4"), "transformers")
    assert export(of("plain"), "transformers") == ""


def test_llama_cpps_options() -> None:
    assert export(of("speculative", draft="small.gguf"), "llama.cpp") == (
        "--model-draft small.gguf --spec-draft-n-max 6 --spec-draft-n-min 0 --spec-draft-p-min 0"
    )
    assert export(of("prompt-lookup"), "llama.cpp").startswith("--spec-type ngram-simple ")
    assert export(of("plain"), "llama.cpp") == "--spec-type none"
    with pytest.raises(IncompatibleError, match="the draft small/ is none: convert it"):
        export(of("speculative", draft="small/"), "llama.cpp")


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("vllm", "ngram"),
        ("vllm", "early-exit"),
        ("vllm", "sequoia"),
        ("vllm", "mentored"),
        ("transformers", "eagle3"),
        ("transformers", "suffix"),
        ("llama.cpp", "eagle3"),
        ("llama.cpp", "suffix"),
    ],
)
def test_an_engine_refuses_what_it_has_not(engine: str, method: str) -> None:
    with pytest.raises(IncompatibleError, match=f"^{engine} has no method like '{method}'"):
        export(of(method, draft="x"), engine)


def test_options_that_another_engine_lacks_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"vllm has no option for match=first"):
        export(of("prompt-lookup", match="first"), "vllm")
    with pytest.raises(IncompatibleError, match=r"no option for shape=tree of method 'suffix'"):
        export(of("suffix", shape="tree"), "vllm")
    with pytest.raises(InvalidParameterError, match="no export for 'sglang'"):
        export(of("plain"), "sglang")
    for engine in EXPORTS:
        with pytest.raises(InvalidParameterError, match="num_speculative_tokens_per_batch_size"):
            export(Configuration("big", Choice("speculative", {}, "x")), engine)
