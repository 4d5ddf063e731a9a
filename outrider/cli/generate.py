"""``outrider generate``: continues a prompt."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from outrider.cli.adaptation import adapting
from outrider.cli.compare import against_plain
from outrider.cli.configuration import Config, configured
from outrider.cli.engines import (
    open_engine,
    plain_engine,
    require_draft_of,
    require_template,
)
from outrider.cli.errors import FAILED, INTERRUPTED, fail, say
from outrider.cli.follow import CANCELLED, follow, warm_up
from outrider.cli.options.adaptation import Adapting
from outrider.cli.options.models import MaxMemory, Models
from outrider.cli.options.output import (
    AsJson,
    Chat,
    Compare,
    Logprobs,
    NoSpecialTokens,
    PromptArgument,
    PromptFile,
    System,
    Trace,
)
from outrider.cli.options.sampling import (
    IgnoreEos,
    JsonSchema,
    LogitBias,
    MaxNewTokens,
    NoGenerationConfig,
    OwnPenalties,
    OwnTruncation,
    Seed,
    Stop,
    StopTokenId,
    parse_logit_bias,
    sampling_of,
)
from outrider.cli.options.sharding import Sharding
from outrider.cli.options.speculation import Speculation
from outrider.cli.prompt import read_chat, read_prompt
from outrider.cli.sharded import follows, is_sharded, open_sharded
from outrider.cli.start import start
from outrider.cli.summary import as_document, comparison_lines, obeyed_line, summary_line
from outrider.cli.trace import has_colour, legend, printer

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.engine import Engine, Event
    from outrider.engine.chat import Message


def generate(
    context: typer.Context,
    prompt: PromptArgument = None,
    file: PromptFile = None,
    chat: Chat = None,
    system: System = None,
    no_special_tokens: NoSpecialTokens = False,
    *,
    models: Models,
    max_memory: MaxMemory = None,
    speculation: Speculation,
    adaptation: Adapting,
    sharding: Sharding,
    truncation: OwnTruncation,
    penalties: OwnPenalties,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    json_schema: JsonSchema = None,
    no_generation_config: NoGenerationConfig = False,
    config: Config = None,
    trace: Trace = False,
    compare: Compare = False,
    as_json: AsJson = False,
    logprobs: Logprobs = None,
) -> None:
    """Continue a prompt. The output goes to stdout, a summary of the run to stderr.

    The embedded pair writes Python; show which draft tokens were accepted:

      outrider generate $'def read_text(path):\\n    with open(path, encoding=' \\
        --temperature 0.8 --top-p 0.9 --stop $'\\n\\n' --trace

    Ask a chat model; its own template wraps the message:

      outrider generate --chat "Why do cats purr?" --system "Be brief." \\
        --target HuggingFaceTB/SmolLM2-135M-Instruct --method suffix

    Compare a pair of your own with plain decoding, at temperature 0:

      outrider generate -f prompt.txt --target big/ --draft small/ \\
        --compare --temperature 0

    Split a target among two processes:

      torchrun --nproc-per-node 2 -m outrider generate -f prompt.txt \\
        --target big/ --draft small/
    """
    sharded = is_sharded(sharding)
    if sharded and (compare or adaptation.wanted):
        raise fail(f"--{'compare' if compare else 'adapt'} needs one process: leave torchrun out")
    if follows():
        models, speculation, _ = configured(context, models, speculation, config, 1)
        open_sharded(
            context,
            sharding,
            models,
            speculation,
            max_memory=max_memory,
            generation_config=not no_generation_config,
        )
    asked = _prompt(prompt, file, chat, system, no_special_tokens)
    special = not no_special_tokens
    biases = parse_logit_bias(logit_bias)
    if as_json and trace:
        raise fail("--trace and --json: choose one; the JSON document has each token's origin")
    if logprobs is not None and not as_json:
        raise fail("--logprobs needs --json: only the JSON document contains them")
    models, speculation, tuned = configured(context, models, speculation, config, 1)
    if compare and speculation.method == "plain":
        raise fail("--compare compares a method with plain: choose another --method")
    require_draft_of(speculation.method, models)
    start(compiles=models.compiles)
    sampling = sampling_of(
        truncation,
        penalties,
        logit_bias=biases,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_token_id=stop_token_id,
        ignore_eos=ignore_eos,
        json_schema=json_schema,
        logprobs=logprobs if logprobs is not None or not as_json else 0,
    )
    open_it = partial(open_sharded, context, sharding) if sharded else open_engine
    engine = open_it(
        models, speculation, max_memory=max_memory, generation_config=not no_generation_config
    )
    if tuned is not None:
        tuned.note_sampling(engine.settled(sampling))
    if chat is not None:
        require_template(engine, models, "give a PROMPT to continue")
    plain = plain_engine(engine) if compare else None
    if plain is not None:
        for each in (engine, plain):
            warm_up(each, asked, sampling, add_special_tokens=special)
    show = None if as_json else _display(engine, asked, trace, special)
    with adapting(engine, adaptation, models) as learning:
        result = follow(engine, asked, sampling, show, add_special_tokens=special)
        if not as_json:
            _line_break(result.text)
        learning.finish()
    comparison, interrupted = None, result.finish_reason == CANCELLED
    if plain is not None and not interrupted:
        other = follow(plain, asked, sampling, add_special_tokens=special)
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
        for line in comparison_lines(result, comparison, engine.method.name) if comparison else ():
            say(line)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if comparison is not None and comparison.failed:
        raise typer.Exit(FAILED)


def _prompt(
    prompt: str | None, file: "Path | None", chat: str | None, system: str | None, bare: bool
) -> "str | list[Message]":
    """The text to continue, or the conversation to answer.

    Raises:
        BadInputError: options that contradict each other, or an empty or unreadable prompt.
    """
    if chat is None:
        if system is not None:
            raise fail(f"--system {system!r} needs --chat: a PROMPT has no system prompt")
        return read_prompt(prompt, file)
    if prompt is not None or file is not None:
        other = "a PROMPT" if prompt is not None else f"--file {file}"
        raise fail(f"--chat {chat!r} and {other}: choose one")
    if bare:
        raise fail(
            f"--chat {chat!r} and --no-special-tokens: the chat template writes the special "
            f"tokens; leave one out"
        )
    return read_chat(chat, system)


def _display(
    engine: "Engine", prompt: "str | list[Message]", trace: bool, add_special_tokens: bool
) -> "Callable[[Event], None]":
    """Prints the prompt on stderr if that is a terminal, and returns what displays each event."""
    console, errors = Console(), Console(stderr=True)
    if trace:
        errors.print(legend(console), end="", soft_wrap=True)
    is_text = isinstance(prompt, str)
    if sys.stdout.isatty() and sys.stderr.isatty():
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        apart = "\n" if not is_text or engine.target.decoder_prompt is not None else ""
        dim = Segment(text + apart, Style(dim=True) if has_colour(errors) else None)
        errors.print(Segments([dim]), end="", soft_wrap=True)
    ids = engine.encode(prompt, add_special_tokens=add_special_tokens)
    return printer(engine, engine.target.decoder_prompt or ids, console, trace)


def _line_break(text: str) -> None:
    """Ends the output's last line if the summary follows it on the same terminal or file."""
    try:
        one = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # at least one is not a real file
        one = False
    if one and not text.endswith("\n"):
        typer.echo("", err=True)
