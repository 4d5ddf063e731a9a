"""``outrider generate``: continues a prompt."""

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from outrider.cli.adaptation import adapting
from outrider.cli.compare import against_plain
from outrider.cli.engines import open_engine, plain_engine, require_draft_of
from outrider.cli.errors import FAILED, INTERRUPTED, fail, say
from outrider.cli.follow import CANCELLED, follow, warm_up
from outrider.cli.options.adaptation import Adapting
from outrider.cli.options.models import MaxMemory, Models
from outrider.cli.options.output import AsJson, Compare, Logprobs, PromptArgument, PromptFile, Trace
from outrider.cli.options.sampling import (
    IgnoreEos,
    LogitBias,
    MaxNewTokens,
    NoGenerationConfig,
    OwnPenalties,
    OwnTruncation,
    Seed,
    Stop,
    StopTokenId,
    parse_logit_bias,
)
from outrider.cli.options.speculation import Speculation
from outrider.cli.prompt import read_prompt
from outrider.cli.start import start
from outrider.cli.summary import as_document, comparison_lines, obeyed_line, summary_line
from outrider.cli.trace import Painter, has_colour, legend

if TYPE_CHECKING:
    from outrider.engine import Engine, Event


def generate(
    prompt: PromptArgument = None,
    file: PromptFile = None,
    *,
    models: Models,
    max_memory: MaxMemory = None,
    speculation: Speculation,
    adaptation: Adapting,
    truncation: OwnTruncation,
    penalties: OwnPenalties,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    no_generation_config: NoGenerationConfig = False,
    trace: Trace = False,
    compare: Compare = False,
    as_json: AsJson = False,
    logprobs: Logprobs = None,
) -> None:
    """Continue a prompt. The output goes to stdout, a summary of the run to stderr.

    The embedded pair writes Python; show which draft tokens were accepted:

      outrider generate $'def read_text(path):\\n    with open(path, encoding=' \\
        --temperature 0.8 --top-p 0.9 --stop $'\\n\\n' --trace

    Compare a pair of your own with plain decoding, at temperature 0:

      outrider generate -f prompt.txt --target big/ --draft small/ \\
        --compare --temperature 0
    """
    prompt_text = read_prompt(prompt, file)
    biases = parse_logit_bias(logit_bias)
    if as_json and trace:
        raise fail("--trace and --json: choose one; the JSON document has each token's origin")
    if logprobs is not None and not as_json:
        raise fail("--logprobs needs --json: only the JSON document contains them")
    if compare and speculation.method == "plain":
        raise fail("--compare compares a method with plain: choose another --method")
    require_draft_of(speculation.method, models)
    start()
    from outrider.sampling import Sampling

    sampling = Sampling(
        **vars(truncation),
        **vars(penalties),
        logit_bias=biases,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=(*(stop or ()), *(stop_token_id or ())),
        ignore_eos=ignore_eos,
        logprobs=logprobs if logprobs is not None or not as_json else 0,
    )
    engine = open_engine(
        models, speculation, max_memory=max_memory, generation_config=not no_generation_config
    )
    plain = plain_engine(engine) if compare else None
    if plain is not None:
        for each in (engine, plain):
            warm_up(each, prompt_text, sampling)
    show = _display(engine, prompt_text, trace, as_json)
    with adapting(engine, adaptation, models) as learning:
        result = follow(engine, prompt_text, sampling, show)
        if not as_json:
            _line_break(result.text)
        learning.finish()
    comparison, interrupted = None, result.finish_reason == CANCELLED
    if plain is not None and not interrupted:
        other = follow(plain, prompt_text, sampling)
        interrupted = other.finish_reason == CANCELLED
        if not interrupted:
            comparison = against_plain(engine, result, other, engine.settled(sampling).greedy)
    if as_json:
        document = as_document(engine, models, sampling, speculation.options, result, comparison)
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        say(summary_line(result))
        if learning.line:
            say(learning.line)
        if engine.obeyed:
            say(obeyed_line(engine.obeyed))
        for line in comparison_lines(result, comparison, speculation.method) if comparison else ():
            say(line)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if comparison is not None and comparison.failed:
        raise typer.Exit(FAILED)


def _display(
    engine: "Engine", prompt: str, trace: bool, as_json: bool
) -> "Callable[[Event], None]":
    """Prints the prompt on stderr if that is a terminal, and returns what displays each event."""
    if as_json:
        return lambda event: None
    console, errors = Console(), Console(stderr=True)
    ids = engine.encode(prompt)
    if trace:
        errors.print(legend(console), end="", soft_wrap=True)
    if sys.stdout.isatty() and sys.stderr.isatty():
        source = "" if engine.target.decoder_prompt is None else "\n"  # output is a text of its own
        dim = Segment(prompt + source, Style(dim=True) if has_colour(errors) else None)
        errors.print(Segments([dim]), end="", soft_wrap=True)
    if not trace:
        return _write
    painter = Painter(engine, engine.target.decoder_prompt or ids, has_colour(console))
    return lambda event: console.print(painter.paint(event), end="", soft_wrap=True)


def _write(event: "Event") -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


def _line_break(text: str) -> None:
    """Ends the output's last line if the summary follows it on the same terminal or file."""
    try:
        one = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # at least one is not a real file
        one = False
    if one and not text.endswith("\n"):
        typer.echo("", err=True)
