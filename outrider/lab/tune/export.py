"""A configuration in the terms of other engines, which refuse what they cannot do.

    vllm           the JSON of ``--speculative-config``, with γ by batch size
    transformers   the keyword arguments of ``generate``, which decodes one sequence at a time
    llama.cpp      the options of ``llama-server``

The configuration was measured here: another engine has other times, and may prefer another γ.
vLLM: docs.vllm.ai, features/speculative_decoding. llama.cpp: docs/speculative.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from outrider import assets
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.chain.length_table import LengthTable
from outrider.lab.tune.configuration import Choice, Configuration

_EMBEDDED = "embedded"
_LOOKUP = {"prompt_lookup_max": "3", "prompt_lookup_min": "1", "match": "latest", "tail": "1"}


def export(configuration: Configuration, engine: str) -> str:
    """The configuration as text for another engine.

    Args:
        configuration: what was tuned.
        engine: ``vllm``, ``transformers`` or ``llama.cpp``.

    Raises:
        InvalidParameterError: another engine.
        IncompatibleError: the engine has no such method.
    """
    if engine not in EXPORTS:
        raise InvalidParameterError(
            f"there is no export for {engine!r}: must be one of {', '.join(EXPORTS)}"
        )
    return EXPORTS[engine](configuration)


def vllm(configuration: Configuration) -> str:
    """The JSON of ``--speculative-config``; ``null`` for plain decoding."""
    return json.dumps(_vllm(configuration.choice))


def transformers(configuration: Configuration) -> str:
    """The keyword arguments of ``generate`` as Python, for batch size 1."""
    values = _transformers(configuration.choice_at(1))
    return ", ".join(f"{name}={value}" for name, value in values.items())


def llama_cpp(configuration: Configuration) -> str:
    """The options of ``llama-server``, which has one γ for all batch sizes: that of batch 1."""
    return shlex.join(_llama_cpp(configuration.choice_at(1)))


EXPORTS: Mapping[str, Callable[[Configuration], str]] = {
    "vllm": vllm,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}


def _vllm(choice: Choice) -> dict[str, Any] | None:
    """Of a method of vLLM's, its fields. vLLM's drafts take the most probable token unless
    ``draft_sample_method`` says otherwise; ours are drawn."""
    lengths = _lengths(choice)
    if choice.method == "plain" or not lengths.most:
        return None
    length = {
        "num_speculative_tokens": lengths.most,
        "num_speculative_tokens_per_batch_size": lengths.as_lists,
    }
    options, drawn = dict(choice.options), {"draft_sample_method": "probabilistic"}
    if choice.method in ("speculative", "block"):
        _no_options(choice, "vllm")
        rule = {"rejection_sample_method": "block"} if choice.method == "block" else {}
        draft = {"method": "draft_model", "model": _draft(choice, "vllm")}
        return draft | length | drawn | rule
    if choice.method in ("eagle3", "dflash", "dspark"):
        _no_options(choice, "vllm")
        head = {"method": choice.method, "model": _draft(choice, "vllm")}
        return head | length | drawn
    if choice.method == "prompt-lookup":
        _lookup_options(choice, "vllm", ("prompt_lookup_max", "prompt_lookup_min"))
        sizes = {
            name: int(options.get(name, _LOOKUP[name]))
            for name in ("prompt_lookup_max", "prompt_lookup_min")
        }
        return {"method": "ngram"} | sizes | length
    if choice.method == "suffix":
        return {"method": "suffix"} | length | _suffix_options(choice)
    raise _refused("vllm", choice.method)


def _suffix_options(choice: Choice) -> dict[str, Any]:
    """vLLM's names of the options of suffix decoding; it counts kept requests, not tokens."""
    names = {
        "factor": "suffix_decoding_max_spec_factor",
        "min_prob": "suffix_decoding_min_token_prob",
    }
    found: dict[str, Any] = {}
    for name, value in choice.options.items():
        if name in names:
            found[names[name]] = float(value)
        elif name == "corpus_tokens" and value == "0":
            found["suffix_decoding_max_cached_requests"] = 0
        elif not (name == "shape" and value == "chain"):
            raise _no_option("vllm", choice, name, value)
    return found


def _transformers(choice: Choice) -> dict[str, str]:
    gamma = _at_one(choice)
    if choice.method == "plain" or gamma == 0:
        return {}
    if choice.method in ("speculative", "sample-match", "greedy"):
        _no_options(choice, "transformers")
        draft = _draft(choice, "transformers")
        return {
            "assistant_model": f"AutoModelForCausalLM.from_pretrained({draft!r})",
            "num_assistant_tokens": str(gamma),
            "num_assistant_tokens_schedule": "'constant'",
            "assistant_confidence_threshold": "0",
        }
    if choice.method == "prompt-lookup":
        _lookup_options(choice, "transformers", ("prompt_lookup_max",))
        longest = choice.options.get("prompt_lookup_max", _LOOKUP["prompt_lookup_max"])
        return {"prompt_lookup_num_tokens": str(gamma), "max_matching_ngram_size": longest}
    if choice.method == "early-exit" and choice.options.get("layer", "half") != "half":
        return {
            "assistant_early_exit": choice.options["layer"],
            "num_assistant_tokens": str(gamma),
            "num_assistant_tokens_schedule": "'constant'",
            "assistant_confidence_threshold": "0",
        }
    raise _refused("transformers", choice.method)


def _llama_cpp(choice: Choice) -> list[str]:
    gamma = _at_one(choice)
    if choice.method == "plain" or gamma == 0:
        return ["--spec-type", "none"]
    lengths = ["--spec-draft-n-max", str(gamma), "--spec-draft-n-min", "0"]
    if choice.method == "speculative":
        _no_options(choice, "llama.cpp")
        draft = _draft(choice, "llama.cpp")
        if not draft.endswith(".gguf"):
            raise IncompatibleError(
                f"llama.cpp reads GGUF files, and the draft {draft} is none: convert it with "
                f"convert_hf_to_gguf.py, and tune with that file"
            )
        return ["--model-draft", draft, *lengths, "--spec-draft-p-min", "0"]
    if choice.method == "prompt-lookup":
        _lookup_options(choice, "llama.cpp", ("prompt_lookup_max",))
        longest = choice.options.get("prompt_lookup_max", _LOOKUP["prompt_lookup_max"])
        sizes = ["--spec-ngram-simple-size-n", longest, "--spec-ngram-simple-size-m", str(gamma)]
        return ["--spec-type", "ngram-simple", *sizes, *lengths]
    raise _refused("llama.cpp", choice.method)


def _lengths(choice: Choice) -> LengthTable:
    """The draft lengths by batch size."""
    if choice.lengths is None:
        raise InvalidParameterError(
            "the configuration has no num_speculative_tokens_per_batch_size to export"
        )
    return choice.lengths


def _at_one(choice: Choice) -> int:
    """The draft length at batch size 1."""
    return _lengths(choice).length(1)


def _draft(choice: Choice, engine: str) -> str:
    draft = choice.draft
    if draft == _EMBEDDED:
        return str(assets.draft_path())
    embedded = assets.named_path(draft)
    if embedded is not None:
        return str(embedded)
    if draft is None:
        raise IncompatibleError(f"method {choice.method!r} has no draft to export for {engine}")
    return draft


def _no_options(choice: Choice, engine: str) -> None:
    for name, value in choice.options.items():
        raise _no_option(engine, choice, name, value)


def _lookup_options(choice: Choice, engine: str, known: tuple[str, ...]) -> None:
    """Refuses options of prompt lookup that the engine lacks and that are not our defaults."""
    for name, value in choice.options.items():
        if name not in known and _LOOKUP.get(name) != value:
            raise _no_option(engine, choice, name, value)


def _no_option(engine: str, choice: Choice, name: str, value: str) -> IncompatibleError:
    return IncompatibleError(
        f"{engine} has no option for {name}={value} of method {choice.method!r}: tune without it"
    )


def _refused(engine: str, method: str) -> IncompatibleError:
    return IncompatibleError(
        f"{engine} has no method like {method!r}: tune with --method for those that it has, or "
        f"decode with outrider"
    )
