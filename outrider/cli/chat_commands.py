"""The commands of ``outrider chat``: lines that begin with a slash."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from outrider.cli.conversation import Conversation
from outrider.cli.errors import fail, say
from outrider.cli.trace import Painter, has_colour, legend

if TYPE_CHECKING:
    from outrider.engine import Result

SLASH = "/"
_NO_SYSTEM = '""'


@dataclass
class Session:
    """What commands read and change.

    Attributes:
        conversation: the conversation.
        trace: whether the tokens of answers are marked by their origin.
        over: whether the user has left.
    """

    conversation: Conversation
    trace: bool = False
    over: bool = False


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        usage: how it is written.
        summary: what it does.
        run: does it, given what stands after its name.
    """

    usage: str
    summary: str
    run: Callable[[Session, str], None]


def is_command(line: str) -> bool:
    """Whether a line is a command; a message that begins with a slash is written with two."""
    return line.startswith(SLASH) and not line.startswith(2 * SLASH)


def run_command(session: Session, line: str) -> None:
    """Runs a command.

    Raises:
        BadInputError: an unknown one, or an argument that it does not take.
    """
    name, _, argument = line.removeprefix(SLASH).partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(SLASH + each for each in COMMANDS)
        raise fail(f"unknown command {SLASH + name!r} ({known})")
    command.run(session, argument.strip())


def _stats(session: Session, argument: str) -> None:
    results = session.conversation.results
    if not results:
        say("no answer yet")
        return
    table = Table("", "last answer", "all answers", box=None, pad_edge=False)
    columns = _numbers(results[-1:]), _numbers(results)
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    for column in table.columns[1:]:
        column.justify = "right"
    Console(stderr=True).print(table)


def _numbers(results: "Sequence[Result]") -> dict[str, str]:
    """Sums and means over answers, as text."""
    from outrider.engine import Stats

    stats = Stats.total(result.stats for result in results)
    drafted = bool(stats.drafted)
    return {
        "answers": f"{len(results)}",
        "tokens": f"{stats.emitted}",
        "tokens per second": f"{stats.tokens_per_second:.1f}",
        "acceptance length": f"{stats.acceptance_length:.2f}",
        "acceptance rate": f"{stats.acceptance_rate:.0%}" if drafted else "nothing drafted",
        "prompt tokens": f"{sum(len(result.prompt_ids) for result in results)}",
        "of these, reused": f"{stats.reused}",
    }


def _trace(session: Session, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise fail(f"/trace {argument}: write /trace, /trace on or /trace off")
    if argument:
        session.trace = argument == "on"
        if session.trace:
            show_legend()
    elif session.conversation.results:
        _show_trace(session, session.conversation.results[-1])
    else:
        say("no answer yet; /trace on marks the tokens of the answers to come")


def show_legend() -> None:
    """Explains the marks of tokens."""
    Console(stderr=True).print(legend(Console(stderr=True)), end="", soft_wrap=True)


def _show_trace(session: Session, result: "Result") -> None:
    from outrider.engine import Event

    console = Console(stderr=True)
    show_legend()
    painter = Painter(session.conversation.engine, result.prompt_ids, has_colour(console))
    event = Event(result.text, result.token_ids, result.origins)
    console.print(painter.paint(event), end="", soft_wrap=True)
    if not result.text.endswith("\n"):
        console.print()
    stats = result.stats
    say(f"{stats.accepted} of {stats.drafted} draft tokens accepted in {stats.rounds} rounds")


def _reset(session: Session, argument: str) -> None:
    session.conversation.reset()
    say("the conversation begins anew")


def _system(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == _NO_SYSTEM else argument
    if conversation.system is None:
        say("no system prompt: the model's template may have one of its own")
    else:
        say(f"system prompt: {conversation.system}")


def _help(session: Session, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        Console(stderr=True, highlight=False).print(
            f"  {command.usage:{width}}  {command.summary}", markup=False
        )
    say(f"a message that begins with a slash is written with two: {2 * SLASH}like this")


def _exit(session: Session, argument: str) -> None:
    session.over = True


COMMANDS = {
    "stats": Command("/stats", "Speed and acceptance, of the last answer and of all.", _stats),
    "trace": Command(
        "/trace [on|off]", "The last answer by its tokens' origins; or mark all to come.", _trace
    ),
    "reset": Command("/reset", "Forget the turns so far; the system prompt stays.", _reset),
    "system": Command(
        "/system [TEXT]", 'Show or change the system prompt; "" removes it.', _system
    ),
    "help": Command("/help", "Show this list.", _help),
    "exit": Command("/exit", "Leave, as Ctrl-C and Ctrl-D do.", _exit),
}
"""The commands by name."""
