"""``outrider generate``: continue a text."""

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from outrider.cli import options
from outrider.cli.compare import against_plain
from outrider.cli.engines import open_engine, plain_engine
from outrider.cli.errors import FAILED, INTERRUPTED, fail, say
from outrider.cli.follow import CANCELLED, follow, warm_up
from outrider.cli.prompt import read_prompt
from outrider.cli.quiet import silence
from outrider.cli.summary import as_document, comparison_lines, summary_line
from outrider.cli.trace import Painter, has_colour, legend

if TYPE_CHECKING:
    from outrider.engine import Engine, Event


def generate(
    prompt: options.PromptArgument = None,
    file: options.PromptFile = None,
    target: options.Target = "embedded",
    draft: options.Draft = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    quantize_draft: options.QuantizeDraft = None,
    quantize_target: options.QuantizeTarget = None,
    kv_dtype: options.KvDtypeName = "auto",
    compile: options.CompileLevel = "off",
    exact: options.Exact = False,
    max_memory: options.MaxMemory = None,
    method: options.MethodName = "speculative",
    option: options.MethodOptions = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    draft_confidence: options.DraftConfidence = 0.0,
    draft_length: options.DraftLength = "fixed",
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = 128,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: options.IgnoreEos = False,
    trace: options.Trace = False,
    compare: options.Compare = False,
    as_json: options.AsJson = False,
    logprobs: options.Logprobs = None,
) -> None:
    """Continue a text. The text goes to standard output, a summary of the run to standard error.

    The embedded pair writes Python; watch which tokens the draft guessed right:

      outrider generate "def fibonacci(n):" --trace

    A pair of your own, against plain decoding, at temperature 0:

      outrider generate -f prompt.txt --target big/ --draft small/ --compare --temperature 0
    """
    text = read_prompt(prompt, file)
    biases = options.parse_logit_bias(logit_bias)
    if as_json and trace:
        raise fail("--trace and --json: choose one; the document has each token's origin")
    if logprobs is not None and not as_json:
        raise fail("--logprobs needs --json, whose document holds them")
    if compare and method == "plain":
        raise fail("--compare holds a method against plain: choose another --method")
    silence()
    from outrider.sampling import Sampling

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=biases,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=(*(stop or ()), *(stop_token_id or ())),
        ignore_eos=ignore_eos,
        logprobs=logprobs if logprobs is not None or not as_json else 0,
    )
    engine = open_engine(
        target,
        draft,
        method,
        num_speculative_tokens,
        method_options=options.parse_method_options(option),
        draft_confidence=draft_confidence,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        quantize_draft=quantize_draft,
        quantize_target=quantize_target,
        kv_dtype=kv_dtype,
        compile=compile,
        exact=exact,
        max_memory=max_memory,
    )
    plain = plain_engine(engine) if compare else None
    if plain is not None:
        for each in (engine, plain):
            warm_up(each, text, sampling)
    result = follow(engine, text, sampling, _display(engine, text, trace, as_json))
    if not as_json:
        _line_break(result.text)
    comparison = None
    if plain is not None and result.finish_reason != CANCELLED:
        other = plain.generate(text, sampling)
        comparison = against_plain(engine, result, other, sampling.greedy)
    if as_json:
        document = as_document(engine, result, comparison)
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        say(summary_line(result))
        for line in comparison_lines(result, comparison, method) if comparison else ():
            say(line)
    if result.finish_reason == CANCELLED:
        raise typer.Exit(INTERRUPTED)
    if comparison is not None and comparison.failed:
        raise typer.Exit(FAILED)


def _display(
    engine: "Engine", prompt: str, trace: bool, as_json: bool
) -> "Callable[[Event], None]":
    """What to do with each event; on a terminal the prompt is shown first, on stderr."""
    if as_json:
        return lambda event: None
    console, errors = Console(), Console(stderr=True)
    ids = engine.encode(prompt)
    if trace:
        errors.print(legend(console), end="", soft_wrap=True)
    if sys.stdout.isatty() and sys.stderr.isatty():
        source = "" if engine.target.opening is None else "\n"  # a text of its own follows
        dim = Segment(prompt + source, Style(dim=True) if has_colour(errors) else None)
        errors.print(Segments([dim]), end="", soft_wrap=True)
    if not trace:
        return _write
    painter = Painter(engine, engine.target.opening or ids, has_colour(console))
    return lambda event: console.print(painter.paint(event), end="", soft_wrap=True)


def _write(event: "Event") -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


def _line_break(text: str) -> None:
    """Ends the text's last line where the summary follows it on the same terminal or file."""
    try:
        one = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # not real files
        one = False
    if one and not text.endswith("\n"):
        typer.echo("", err=True)
