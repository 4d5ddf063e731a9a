"""The summary lines of a run, and its JSON document."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.cli.compare import Comparison
from outrider.cli.options.models import EMBEDDED, Models

if TYPE_CHECKING:
    from outrider.engine import Engine, Result
    from outrider.sampling import Sampling

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_new_tokens",
)

_LONGEST = 24


def summary_line(result: "Result") -> str:
    """One line: number of tokens, speed, acceptance, measured divergence and finish reason."""
    stats = result.stats
    if stats.drafted:
        middle = (
            f"acceptance length {stats.acceptance_length:.2f}, rate {stats.acceptance_rate:.0%}, "
            f"α {stats.alpha:.2f}"
        )
    else:
        middle = "nothing drafted"
    if stats.measured:
        middle += f" | KL {stats.kl_per_token:.3f} nats per token, {stats.kl:.2f} in all"
    tokens = "1 token" if stats.emitted == 1 else f"{stats.emitted} tokens"
    return f"{tokens}, {stats.tokens_per_second:.0f} tok/s | {middle} | end: {result.finish_reason}"


def obeyed_line(obeyed: Mapping[str, object]) -> str:
    """The settings taken from the target's generation config, which no option overrides."""
    settings = ", ".join(f"{name} {_short(value)}" for name, value in obeyed.items())
    return f"generation config: {settings} (ignore it: --no-generation-config)"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def comparison_lines(result: "Result", comparison: Comparison, method: str) -> list[str]:
    """Both speeds and the speed-up; for greedy outputs, also whether they are identical."""
    plain, fast = comparison.plain.stats.tokens_per_second, result.stats.tokens_per_second
    lines = [
        f"plain {plain:.1f} tok/s, {method} {fast:.1f} tok/s: {comparison.speedup:.2f}× the speed"
    ]
    if comparison.comparable:
        what = comparison.first_difference or "identical"
        lines.append(f"greedy outputs, plain and {method}: {what}")
    return lines


def as_document(
    engine: "Engine",
    models: Models,
    sampling: "Sampling",
    options: Mapping[str, str],
    result: "Result",
    comparison: Comparison | None,
) -> dict[str, Any]:
    """The document that ``--json`` prints; docs/json.md describes its keys."""
    from outrider.lab.versions import versions

    drafts = engine.method.name != "plain"
    settled = engine.settled(sampling)
    return {
        "method": engine.method.name,
        "options": dict(options),
        "target": models.target,
        "draft": None if engine.draft is None else models.draft or EMBEDDED,
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "device": str(engine.target.device),
        "num_speculative_tokens": engine.num_speculative_tokens if drafts else None,
        **{name: getattr(settled, name) for name in _SAMPLING},
        "versions": versions(),
        "prompt": result.prompt,
        "prompt_ids": list(result.prompt_ids),
        "text": result.text,
        "tokens": _pieces(engine, result),
        "token_ids": list(result.token_ids),
        "origins": list(result.origins),
        "logprobs": list(result.logprobs),
        "top_logprobs": [
            dict(zip(map(str, top.token_ids), top.logprobs, strict=True))
            for top in result.top_logprobs
        ],
        "finish_reason": result.finish_reason,
        "stats": result.stats.as_dict(),
        "comparison": None if comparison is None else comparison.as_dict(),
    }


def _pieces(engine: "Engine", result: "Result") -> list[str]:
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    return [str(tokenizer.decode([token])) for token in result.token_ids]
