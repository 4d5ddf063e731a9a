"""``outrider.toml``: what ``outrider tune`` found, for the commands that decode.

    target = "big/"
    draft = "small/"
    method = "speculative"
    num_speculative_tokens_per_batch_size = [[1, 4, 6], [5, 16, 3], [17, 64, 0]]

This is one method for an engine that runs at all batch sizes. Where another one was faster at some
batch sizes, it is in a table ``[[at_batch_size]]`` of its own, with the range of batch sizes for
which it is the best. Paths that begin with ``./`` or ``../`` are relative to the file; those of
models that are there are written so.

A configuration is *stale* where the weights of target or draft, or the hardware, are not those that
were measured.

How much a lossy method diverges depends on temperature and truncation, so the file names those of
the measurements.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.length_table import LengthTable
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.model_files import fingerprint
from outrider.lab.tune.machine import Source
from outrider.lab.tune.tuning import Tuning
from outrider.sampling import Sampling

NAME = "outrider.toml"
_EMBEDDED = "embedded"
_TEMPERATURE = "tuned_at_temperature"
_TRUNCATION = "tuned_with_truncation"
_NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_TABLE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class Choice:
    """A method, and how many tokens it drafts.

    Attributes:
        method: its name.
        options: its own options, as texts.
        draft: its draft model or head; None for a method without one.
        lengths: γ by batch size; None leaves it to the engine.
    """

    method: str
    options: Mapping[str, str] = field(default_factory=dict)
    draft: str | None = None
    lengths: LengthTable | None = None


@dataclass(frozen=True)
class Configuration:
    """A configuration file.

    Attributes:
        target: folder or hub id, or ``embedded``.
        choice: for an engine that runs at all batch sizes.
        at_batch_size: first and last batch size at which another choice is better.
        settings: how models run: ``dtype``, ``device``, ``compile``, ``kv_dtype``, ``exact``,
            ``quantize_target``, ``quantize_draft``; those that are not the defaults.
        fingerprints: of ``target``, of each draft by its name, and of ``hardware``.
        measured: numbers for a reader; no command uses them.
        temperature: at which everything was measured; None where the file does not say.
        truncation: with which: ``top_k``, ``top_p`` and ``min_p`` as far as they truncate.
        path: of the file; None before it is written.
    """

    target: str
    choice: Choice
    at_batch_size: tuple[tuple[int, int, Choice], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[Mapping[str, Any], ...] = ()
    temperature: float | None = None
    truncation: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None

    def choice_at(self, batch_size: int | None = None) -> Choice:
        """The best choice at a batch size; None is for an engine that runs at all of them."""
        if batch_size is not None:
            for first, last, choice in self.at_batch_size:
                if first <= batch_size <= last:
                    return choice
        return self.choice

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices for all batch sizes and for some."""
        return self.choice, *(choice for _, _, choice in self.at_batch_size)

    def with_options_renamed(self, renamed: Callable[[str], str]) -> Configuration:
        """The configuration with other values of the methods' options, also of measured ones."""

        def of_choice(choice: Choice) -> Choice:
            options = {name: renamed(value) for name, value in choice.options.items()}
            return replace(choice, options=options)

        others = ((first, last, of_choice(each)) for first, last, each in self.at_batch_size)
        measured = tuple(
            {**each, "method": renamed(each["method"])} if "method" in each else each
            for each in self.measured
        )
        return replace(
            self,
            choice=of_choice(self.choice),
            at_batch_size=tuple(others),
            measured=measured,
        )

    def stale(self, choice: Choice, hardware: str) -> list[str]:
        """What differs from what was measured, in words; nothing where all is the same.

        Args:
            choice: the one to use.
            hardware: the name of this machine's processor or GPU.
        """
        found = []
        for role, name in (("target", self.target), ("draft", choice.draft)):
            key = "target" if role == "target" else f"draft {name}"
            if name is not None and self.fingerprints.get(key) != fingerprint(name, role):
                found.append(f"the weights of {role} {name} are not those that were measured")
        measured = self.fingerprints.get("hardware")
        if measured != hardware:
            found.append(f"it was measured on {measured or 'unknown hardware'}, this is {hardware}")
        return found

    def unmeasured_divergence(self, choice: Choice, sampling: Sampling | None) -> str | None:
        """Why it is unknown how much the outputs of a choice diverge, in words; None where it was
        measured, or where the method is lossless.

        Args:
            choice: the one to use.
            sampling: of the requests; None where each has its own. Truncation that is None is
                the model's own, as in the measurements.
        """
        spec = MethodSpec.of(choice.method, choice.options)
        temperature = None if sampling is None else sampling.temperature
        used = (0.0, 1.0) if temperature is None else (temperature,)
        truncation = dict(self.truncation)
        if sampling is not None:
            given = {name: getattr(sampling, name) for name in _NO_TRUNCATION}
            truncation |= {name: each for name, each in given.items() if each is not None}
            truncation = _truncating(truncation)
        is_measured = used == (self.temperature,) and truncation == self.truncation
        if all(spec.lossless_at(each) for each in used) or is_measured:
            return None
        known = self.temperature is not None
        tuned_at = f"temperature {self.temperature:g}" if known else "an unknown temperature"
        tuned_at += _with(self.truncation)
        others = "others" if temperature is None else f"{temperature:g}{_with(truncation)}"
        return (
            f"method {choice.method} is lossy and was tuned at {tuned_at}; how much its output "
            f"diverges from the target at {others} was not measured"
        )


def truncation_of(sampling: Sampling) -> dict[str, float]:
    """The parameters of a sampling that truncate its distributions."""
    return _truncating({name: getattr(sampling, name) or 0 for name in _NO_TRUNCATION})


def _truncating(values: Mapping[str, float]) -> dict[str, float]:
    return {name: each for name, each in values.items() if each not in (0, _NO_TRUNCATION[name])}


def _with(truncation: Mapping[str, float]) -> str:
    pairs = [f"{name} {each:g}" for name, each in truncation.items()]
    return f" with {' and '.join(pairs)}" if pairs else ""


def configuration_of(
    tuning: Tuning, target: str, settings: Mapping[str, Any], hardware: str, sampling: Sampling
) -> Configuration:
    """What a tuning found, as a configuration.

    Args:
        tuning: with an answer.
        target: folder or hub id, or ``embedded``.
        settings: how the models ran.
        hardware: the name of the processor or GPU.
        sampling: with which was measured.
    """
    answer = tuning.answer
    assert answer is not None
    overall = answer.overall
    others, first = [], 1
    drafts = {overall.draft}
    for size, best in answer.best.items():
        source = best.configuration.source
        if source != overall and not best.configuration.is_plain:
            others.append((first, size, _choice(source, answer.table(source))))
            drafts.add(source.draft)
        first = size + 1
    fingerprints = {"hardware": hardware, "target": fingerprint(target, "target")}
    for draft in sorted(each for each in drafts if each is not None):
        fingerprints[f"draft {draft}"] = fingerprint(draft, "draft")
    measured = tuple(each.as_dict() for each in answer.best.values())
    choice = _choice(overall, answer.table(overall))
    return Configuration(
        target,
        choice,
        tuple(others),
        settings,
        fingerprints,
        measured,
        sampling.temperature,
        truncation_of(sampling),
    )


def _choice(source: Source, lengths: LengthTable) -> Choice:
    spec = MethodSpec.parse(source.method)
    options = {name: str(value) for name, value in spec.options.items()}
    return Choice(spec.name, options, source.draft, lengths)


def read_configuration(path: Path) -> Configuration:
    """Reads a configuration file.

    Raises:
        InvalidParameterError: it cannot be read, is no TOML, lacks a name, or has a value of
            another type.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameterError(f"cannot read configuration '{path}': {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameterError(f"configuration '{path}': {error}") from None
    read = _Reader(path)
    others = []
    for each in read.tables(values, "at_batch_size"):
        bounds = read.value(each, "batch_sizes", list)
        if len(bounds) != 2 or not all(isinstance(n, int) for n in bounds):
            raise read.error("batch_sizes", bounds, "a first and a last batch size")
        others.append((bounds[0], bounds[1], read.choice(each)))
    return Configuration(
        read.model(read.value(values, "target", str)),
        read.choice(values),
        tuple(others),
        read.value(values, "settings", dict, {}),
        {
            read.model_in_key(key): str(value)
            for key, value in read.value(values, "fingerprints", dict, {}).items()
        },
        tuple(read.tables(values, "measured")),
        read.number(values, _TEMPERATURE),
        read.numbers(values, _TRUNCATION),
        path,
    )


def write_configuration(configuration: Configuration, path: Path) -> None:
    """Writes a configuration file, by way of a temporary one.

    Raises:
        InvalidParameterError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = as_toml(_seen_from(path.absolute().parent.resolve(), configuration))
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InvalidParameterError(
            f"cannot write configuration '{path}': {error.strerror or error}"
        ) from error


def _seen_from(folder: Path, configuration: Configuration) -> Configuration:
    """The configuration with relative paths as they are from the file's folder, not from the
    working directory."""

    def seen(name: str) -> str:
        path = Path(name)
        if name == _EMBEDDED or path.is_absolute() or not path.exists():
            return name
        whole = path.absolute()
        found = os.path.relpath(whole.parent.resolve() / whole.name, folder)
        return found if found.startswith("..") else f"./{found}"

    def of_choice(choice: Choice) -> Choice:
        options = {
            name: seen(value) if "/" in value else value for name, value in choice.options.items()
        }
        draft = None if choice.draft is None else seen(choice.draft)
        return replace(choice, options=options, draft=draft)

    def of_key(key: str) -> str:
        role, _, name = key.partition(" ")
        return f"{role} {seen(name)}" if name else key

    return replace(
        configuration,
        target=seen(configuration.target),
        choice=of_choice(configuration.choice),
        at_batch_size=tuple(
            (first, last, of_choice(choice)) for first, last, choice in configuration.at_batch_size
        ),
        fingerprints={of_key(key): each for key, each in configuration.fingerprints.items()},
    )


def as_toml(configuration: Configuration) -> str:
    """The text of the file."""
    blocks = [
        [
            "# Written by `outrider tune`. generate, chat, bench and serve read it; options on the",
            "# command line win.",
            f"target = {_text(configuration.target)}",
            *_choice_lines(configuration.choice),
            *_pairs({_TEMPERATURE: configuration.temperature}),
            *_table_line(_TRUNCATION, configuration.truncation),
        ]
    ]
    if configuration.settings:
        blocks.append(["[settings]", *_pairs(configuration.settings)])
    if configuration.fingerprints:
        blocks.append(["[fingerprints]", *_pairs(configuration.fingerprints)])
    for first, last, choice in configuration.at_batch_size:
        head = ["[[at_batch_size]]", f"batch_sizes = [{first}, {last}]"]
        blocks.append([*head, *_choice_lines(choice)])
    for each in configuration.measured:
        blocks.append(["[[measured]]", *_pairs(each)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


class _Reader:
    """Reads values of a file and names it in errors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, name: str, value: object, wanted: str) -> InvalidParameterError:
        return InvalidParameterError(
            f"configuration '{self._path}': {name} = {value!r}: must be {wanted}"
        )

    def value(self, values: Mapping[str, Any], name: str, kind: type, *default: Any) -> Any:
        if name not in values:
            if default:
                return default[0]
            raise InvalidParameterError(
                f"configuration '{self._path}' has no {name}: write it with `outrider tune -o "
                f"{self._path}`"
            )
        if not isinstance(values[name], kind):
            names: dict[type, str] = {str: "a text", dict: "a table", list: "a list"}
            raise self.error(name, values[name], names[kind])
        return values[name]

    def number(self, values: Mapping[str, Any], name: str) -> float | None:
        """A number; None where the file has none."""
        found = values.get(name)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise self.error(name, found, "a number")
        return None if found is None else float(found)

    def numbers(self, values: Mapping[str, Any], name: str) -> dict[str, float]:
        """A table of numbers of truncation; empty if the file has none."""
        table: Mapping[str, Any] = self.value(values, name, dict, {})
        if unknown := [each for each in table if each not in _NO_TRUNCATION]:
            raise self.error(name, dict(table), f"of {', '.join(_NO_TRUNCATION)}, not {unknown[0]}")
        found = {each: self.number(table, each) for each in table}
        return {each: number for each, number in found.items() if number is not None}

    def tables(self, values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        listed: list[Mapping[str, Any]] = self.value(values, name, list, [])
        if not all(isinstance(each, Mapping) for each in listed):
            raise self.error(name, listed, f"tables [[{name}]]")
        return listed

    def choice(self, values: Mapping[str, Any]) -> Choice:
        draft = self.value(values, "draft", str, None)
        options = self.value(values, "options", dict, {})
        table = values.get(_TABLE)
        try:
            lengths = None if table is None else LengthTable.of(table)
        except InvalidParameterError as error:
            raise InvalidParameterError(
                f"configuration '{self._path}', {_TABLE}: {error}"
            ) from None
        return Choice(
            self.value(values, "method", str),
            {name: self.model(str(each)) for name, each in options.items()},
            None if draft is None else self.model(draft),
            lengths,
        )

    def model(self, name: str) -> str:
        """A path relative to the file as one that the process can open."""
        return str(self._path.parent / name) if name.startswith(("./", "../")) else name

    def model_in_key(self, key: str) -> str:
        """The key of a draft's fingerprint, with its path likewise."""
        role, _, name = key.partition(" ")
        return f"{role} {self.model(name)}" if name else key


def _choice_lines(choice: Choice) -> list[str]:
    lines = [] if choice.draft is None else [f"draft = {_text(choice.draft)}"]
    lines.append(f"method = {_text(choice.method)}")
    lines += _table_line("options", choice.options)
    if choice.lengths is not None:
        lines.append(f"{_TABLE} = {json.dumps(choice.lengths.as_lists)}")
    return lines


def _table_line(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table on a single line; nothing if it is empty."""
    return [f"{name} = {{ {', '.join(_pairs(values))} }}"] if values else []


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    """``name = value`` of each value that is not None."""
    for name, value in values.items():
        if value is not None:
            key = name if name.replace("_", "").isalnum() and name.isascii() else _text(name)
            yield f"{key} = {_text(value)}"


def _text(value: Any) -> str:
    """A text, a truth value, a number or a list of them as TOML, which writes them as JSON does."""
    if isinstance(value, str):  # TOML escapes DEL, too, and reads no surrogates
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.1f}"
    return json.dumps(value)
