"""``outrider.toml`` on the command line: what it says holds where no option says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.errors import fail, say
from outrider.cli.options.models import EMBEDDED, Models
from outrider.cli.options.speculation import AUTO, Speculation
from outrider.cli.start import start
from outrider.methods.catalogue import entries

if TYPE_CHECKING:
    from outrider import Sampling
    from outrider.lab.tune.configuration import Choice, Configuration

FILE = "outrider.toml"
_OWN_METHOD = ("method", "option")
"""Options that replace the file's method, and its draft and lengths with it."""

_OWN_LENGTHS = ("num_speculative_tokens", "draft_confidence", "draft_length")
"""Options that replace the file's lengths only."""

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A configuration that `outrider tune` wrote; options given here replace its values. "
        "Default: outrider.toml in the working directory, if there is one.",
    ),
]


@dataclass(frozen=True)
class TunedMethod:
    """A method that a configuration file chose.

    Attributes:
        file: the configuration.
        choice: what it says for the requests of this command.
    """

    file: "Configuration"
    choice: "Choice"

    def note_sampling(self, sampling: "Sampling | None") -> None:
        """Says on stderr where a lossy method was tuned at another temperature or truncation than
        these; with None, where requests may have any."""
        if why := self.file.unmeasured_divergence(self.choice, sampling):
            say(
                f"note: {self.file.path}: {why}; `outrider tune --temperature T` measures it at "
                f"another temperature, and with --top-k, --top-p or --min-p with truncation"
            )


def configured(
    context: typer.Context,
    models: Models,
    speculation: Speculation,
    config: Path | None,
    batch_size: int | None,
) -> tuple[Models, Speculation, TunedMethod | None]:
    """The options, those that were not given from the configuration file, and the method if it is
    the file's. Says on stderr which file that is, and why it is not used where it is not.

    Args:
        context: of the command, which knows what options were given.
        models, speculation: the options.
        config: the file that the user named.
        batch_size: requests that will run together; None for a server, where that changes.
    """
    found = find(config)
    if found is None:
        return models, speculation, None
    from outrider.lab.model_files import same_model

    given = _given(context)
    if "target" in given and not same_model(models.target, found.target):
        say(f"note: {found.path} is for target {found.target}, so nothing of it is used")
        return models, speculation, None
    own = given.intersection(_OWN_METHOD)
    choice = found.choice_at(batch_size)
    settings = {name: each for name, each in found.settings.items() if hasattr(models, name)}
    values: dict[str, Any] = {"target": found.target} | settings
    if not own and "draft" not in given:
        values["draft"] = choice.draft
    models = replace(models, **{name: each for name, each in values.items() if name not in given})
    tuned = None
    if own or ("draft" in given and not same_model(models.draft, choice.draft)):
        say(f"using {found.path} for the target and how it runs, and the options for the rest")
    else:
        own_lengths = bool(given.intersection(_OWN_LENGTHS))
        speculation = _speculation(speculation, found, choice, own_lengths)
        tuned = TunedMethod(found, choice)
    if "quantize_draft" not in given and not _has_draft(models, speculation.method):
        models = replace(models, quantize_draft=None)  # that of another method in the file
    return models, speculation, tuned


def bench_values(
    config: Path | None, values: Mapping[str, Any]
) -> tuple[dict[str, Any], TunedMethod | None]:
    """A benchmark's values, those that were not given from the configuration file: the target, how
    models run, and as the only method that of the file, which is also returned."""
    found = find(config)
    if found is None:
        return dict(values), None
    from outrider.lab.model_files import same_model

    target = values.get("target")
    if isinstance(target, str) and not same_model(target, found.target):
        say(f"note: {found.path} is for target {found.target}, so nothing of it is used")
        return dict(values), None
    filled = {"target": found.target, **found.settings, **values}
    tuned = None
    if "methods" not in values and "drafts" not in values:
        sizes = values.get("batch_sizes")
        listed = sizes if isinstance(sizes, list) else [sizes or 1]
        choice = found.choice_at(listed[0] if len(listed) == 1 else None)
        filled["methods"] = [_spec(choice, _is_stale(found, choice), "gammas" in values)]
        filled["drafts"] = [] if choice.draft is None else [choice.draft]
        tuned = TunedMethod(found, choice)
    say(f"using {found.path}")
    return filled, tuned


def find(config: Path | None) -> "Configuration | None":
    """The configuration that the user named, or that of the working directory; None without one.

    Raises:
        BadInputError: a file that was named and is not there.
    """
    path = Path(FILE) if config is None else config
    if config is not None and not path.is_file():
        raise fail(f"--config {config}: no such file; `outrider tune -o {config}` writes one")
    if not path.is_file():
        return None
    start("outrider.lab.tune.configuration")
    from outrider.lab.tune.configuration import read_configuration

    return read_configuration(path)


def _has_draft(models: Models, method: str | None) -> bool:
    """Whether a method, or the one of the draft where none is named, runs a draft model or head."""
    if method is None or method == AUTO:
        return models.draft is not None or models.target == EMBEDDED
    entry = entries().get(method)
    return entry is None or entry.needs_draft or entry.needs_head


def _speculation(
    speculation: Speculation, found: "Configuration", choice: "Choice", own_lengths: bool
) -> Speculation:
    """The method of a choice, and its lengths unless the user gave others; where they are stale,
    the engine measures instead how many tokens pay."""
    options = [f"{name}={value}" for name, value in choice.options.items()]
    speculation = replace(speculation, method=choice.method, option=options)
    if own_lengths:
        say(f"using {found.path}: method {choice.method}, with the lengths of the options")
        return speculation
    if _is_stale(found, choice, "the engine measures as it runs how many tokens pay"):
        measured: Any = AUTO
        return replace(speculation, num_speculative_tokens=measured)
    say(f"using {found.path}: method {choice.method}")
    if choice.lengths is None or not choice.lengths.most:
        return speculation
    return replace(speculation, draft_length=f"table:{choice.lengths}")


def _is_stale(
    found: "Configuration", choice: "Choice", instead: str = "its draft lengths are not used"
) -> bool:
    """Whether the numbers were measured with other weights or elsewhere; says so if they were, and
    what is done instead."""
    from outrider.lab.metadata import hardware

    differences = found.stale(choice, hardware())
    if differences:
        say(
            f"note: {found.path} is stale: {'; '.join(differences)}; {instead}, and `outrider "
            f"tune` measures anew"
        )
    return bool(differences)


def _spec(choice: "Choice", stale: bool, has_gammas: bool) -> str:
    """The method as ``outrider bench`` writes it."""
    pairs = [f"{name}={value}" for name, value in choice.options.items()]
    lengths = choice.lengths
    if lengths is not None and lengths.most and not stale and not has_gammas:
        pairs.append(f"draft_length=table:{lengths}")
    return f"{choice.method}:{','.join(pairs)}" if pairs else choice.method


def _given(context: typer.Context) -> set[str]:
    """The names of the parameters that stand on the command line or in the environment."""
    found = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            found.add(name)
    return found | ({"target"} if "model" in found else set())
