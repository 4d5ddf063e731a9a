"""``outrider chat``: a conversation in the terminal."""

import typer
from rich.console import Console

from outrider.cli.chat_commands import Session, is_command, run_command, show_legend
from outrider.cli.configuration import Config, configured
from outrider.cli.conversation import Conversation
from outrider.cli.engines import open_engine, require_draft_of, require_template
from outrider.cli.errors import report, say
from outrider.cli.follow import CANCELLED
from outrider.cli.lines import is_interactive, lines
from outrider.cli.options.models import MaxMemory, Models, PrefixCache
from outrider.cli.options.output import System, Trace
from outrider.cli.options.sampling import (
    IgnoreEos,
    LogitBias,
    MaxNewTokens,
    NoGenerationConfig,
    OwnPenalties,
    OwnTruncation,
    SeedOrNone,
    Stop,
    StopTokenId,
    parse_logit_bias,
    sampling_of,
)
from outrider.cli.options.speculation import Speculation
from outrider.cli.start import start
from outrider.cli.trace import printer

_PROMPT = "> "


def chat(
    context: typer.Context,
    *,
    system: System = None,
    models: Models,
    max_memory: MaxMemory = None,
    prefix_cache: PrefixCache = "512MiB",
    speculation: Speculation,
    truncation: OwnTruncation,
    penalties: OwnPenalties,
    logit_bias: LogitBias = None,
    seed: SeedOrNone = None,
    max_new_tokens: MaxNewTokens = 512,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    no_generation_config: NoGenerationConfig = False,
    config: Config = None,
    trace: Trace = False,
) -> None:
    """Talk to a chat model. Answers go to stdout, everything else to stderr.

    Each line is a message; from a pipe or a file, too. Ctrl-C ends an answer, which stays in the
    conversation as far as it was written; at the prompt Ctrl-C or Ctrl-D leaves. /help lists the
    commands, such as /stats and /trace.

      outrider chat --target HuggingFaceTB/SmolLM2-135M-Instruct --method suffix

    The oldest turns are dropped, after a note, once the conversation outgrows the model's context.
    """
    biases = parse_logit_bias(logit_bias)
    models, speculation, tuned = configured(context, models, speculation, config, 1)
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
    )
    engine = open_engine(
        models,
        speculation,
        max_memory=max_memory,
        prefix_cache=None if prefix_cache == "0" else prefix_cache,
        generation_config=not no_generation_config,
        background=True,
    )
    require_template(engine, models, "continue a text with outrider generate")
    settled = engine.settled(sampling)  # reports wrong parameters before the first message
    if tuned is not None:
        tuned.note_sampling(settled)
    session = Session(Conversation(engine, sampling, system), trace)
    if is_interactive():
        say(f"chat by method {engine.method.name}: /help lists commands, Ctrl-D leaves")
    if trace:
        show_legend()
    for line in lines(_PROMPT):
        _take(session, line)
        if session.over:
            return


def _take(session: Session, line: str) -> None:
    """Runs a command or answers a message. Where a user types, an error ends neither the
    conversation nor the command."""
    try:
        if is_command(line):
            run_command(session, line)
        elif line.strip():
            _answer(session, line.replace("//", "/", 1) if line.startswith("//") else line)
    except KeyboardInterrupt:
        if not is_interactive():
            raise
        say("interrupted before the answer began; the message does not count")
    except Exception as error:
        if not is_interactive():
            raise
        report(error)


def _answer(session: Session, message: str) -> None:
    conversation = session.conversation
    engine, dropped = conversation.engine, conversation.make_room(message)
    if dropped:
        what = "the oldest turn is" if dropped == 1 else f"the {dropped} oldest turns are"
        say(
            f"note: the context of {engine.limit} tokens is full: {what} dropped (/reset drops all)"
        )
    prompt_ids = engine.encode(conversation.messages(message))
    result = conversation.ask(message, printer(engine, prompt_ids, Console(), session.trace))
    if not result.text.endswith("\n"):
        typer.echo()
    if result.finish_reason == CANCELLED:
        say("note: interrupted; the answer so far stays in the conversation")
    elif result.finish_reason == "length":
        say(f"note: cut after {len(result.token_ids)} tokens (--max-new-tokens)")
    elif result.finish_reason == "context":
        say(f"note: cut at the end of the context of {engine.limit} tokens (/reset begins anew)")
