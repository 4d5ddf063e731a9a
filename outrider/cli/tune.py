"""``outrider tune``: measures which draft, which method and how many tokens are the fastest."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.bench import prompts_of
from outrider.cli.errors import INTERRUPTED, fail, say
from outrider.cli.options.bench import AsJson, BenchModels, Prompting
from outrider.cli.options.models import EMBEDDED
from outrider.cli.options.tune import Export, Output, Plot, TuneGrid, TuneRun
from outrider.cli.progress import Progress
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab.bench import BenchPlan
    from outrider.lab.tune.quality import QualityFloor
    from outrider.lab.tune.run import Candidates
    from outrider.lab.tune.tuning import Tuning

_PICTURES = (".svg", ".png")
_EXPORTS = ("vllm", "transformers", "llama.cpp")
_SIZES = (1, 4, 16)


def tune(
    *,
    grid: TuneGrid,
    prompting: Prompting,
    run: TuneRun,
    models: BenchModels,
    output: Output = Path("outrider.toml"),
    plot: Plot = None,
    export: Export = None,
    as_json: AsJson = False,
) -> None:
    """Find out which draft, which method and how many tokens are the fastest for you.

    Measures each source of drafts on your prompts and this machine, predicts every draft length at
    every batch size, and runs the best ones for real, interleaved with plain decoding. The answer
    may be not to speculate. It goes to stdout in plain words and to outrider.toml, which generate,
    chat, bench and serve read. With the embedded pair:

      outrider tune --minutes 2

    With drafts, a head and prompts of your own:

      outrider tune --target big/ --draft small/ --draft head/ \\
        --data prompts.jsonl --batch-size 1 --batch-size 8

    Only lossless methods are considered, unless --divergence-budget or --metric allows others.
    Ctrl-C ends the tuning with the answer of what was measured until then.
    """
    _check_files(output, plot)
    if export is not None and export not in _EXPORTS:
        raise fail(f"--export {export!r}: must be {', '.join(_EXPORTS[:-1])} or {_EXPORTS[-1]}")
    if export is not None and as_json:
        raise fail(
            "--export and --json both print to stdout: leave one out; `outrider config export` "
            "prints the other afterwards"
        )
    start("outrider.lab.tune.run")
    from outrider.lab.plots import require_matplotlib
    from outrider.lab.tune.run import tuner_of
    from outrider.lab.tune.tuning import TuneSettings

    if plot is not None:
        require_matplotlib()
    sizes = tuple(sorted(set(grid.batch_size or _SIZES)))
    settings = TuneSettings(sizes, run.minutes, run.max_new_tokens, run.seed or 0)
    table = _NgramTable(output)
    plan = _plan(grid, prompting, run, models, sizes)
    given = _candidates(grid, models, table.counted)
    with table, Progress(quiet=as_json) as progress:
        tuning = tuner_of(plan, settings, given, progress.show).run()
        _write(tuning, plan, output, table)
    if plot is not None:
        from outrider.lab.tune.plot import draw

        assert tuning.answer is not None
        draw(tuning.answer, _title(plan), plot)
        say(f"wrote {plot}")
    if as_json:
        typer.echo(table.named(json.dumps(tuning.as_dict())))
    else:
        from outrider.cli.tune_table import show

        show(tuning)
    if export is not None:
        from outrider.lab.tune.configuration import read_configuration
        from outrider.lab.tune.export import export as exported

        typer.echo(exported(read_configuration(output), export))
    if tuning.interrupted:
        say("interrupted: the answer is that of what was measured until then")
        raise typer.Exit(INTERRUPTED)


def _plan(
    grid: TuneGrid,
    prompting: Prompting,
    run: TuneRun,
    models: BenchModels,
    sizes: tuple[int, ...],
) -> "BenchPlan":
    """How models run, and on which prompts. The plan's own methods do not matter."""
    from outrider.lab.bench import plan_of

    values = models.given()
    values["data"] = prompts_of(values, prompting)
    truncation = {"top_k": grid.top_k, "top_p": grid.top_p, "min_p": grid.min_p}
    values |= {name: value for name, value in truncation.items() if value is not None}
    return plan_of(
        values
        | {
            "methods": ["plain"],
            "temperatures": [grid.temperature],
            "batch_sizes": list(sizes),
            "max_new_tokens": run.max_new_tokens,
            "seed": run.seed or 0,
            "ignore_eos": run.ignore_eos,
        }
    )


def _candidates(grid: TuneGrid, models: BenchModels, ngram_file: Path) -> "Candidates":
    from outrider.lab.tune.run import Candidates
    from outrider.train.ngram import build_ngram

    return Candidates(
        tuple(models.drafts or ()),
        tuple(grid.method or ()),
        grid.num_speculative_tokens,
        grid.divergence_budget,
        ngram_file,
        build_ngram,
        _quality(grid),
    )


def _quality(grid: TuneGrid) -> "QualityFloor | None":
    """What lossy methods have to reach."""
    from outrider.lab.tune.quality import AT_LEAST, QualityFloor

    if grid.metric is not None:
        return QualityFloor(grid.metric, grid.at_least, grid.references)
    for flag, is_given in (
        ("--references", grid.references is not None),
        ("--at-least", grid.at_least != AT_LEAST),
    ):
        if is_given:
            raise fail(f"{flag} says how good outputs have to be by a metric: add --metric NAME")
    return None


class _NgramTable:
    """The n-gram table that a tuning counts. Until the configuration is written, it lies beside the
    one of the last tuning, which the present configuration may need.

    Args:
        output: the configuration.

    Attributes:
        counted: where the table is counted.
        file: where it lies in the end: beside the configuration, which names it.
    """

    def __init__(self, output: Path) -> None:
        self.file = output.absolute().with_suffix(".ngram")
        self.counted = self.file.with_name(f".{self.file.name}.{os.getpid()}")

    def __enter__(self) -> "_NgramTable":
        return self

    def __exit__(self, *_: object) -> None:
        self.counted.unlink(missing_ok=True)

    def keep(self) -> None:
        """Puts the table in the place of the last one."""
        self.counted.replace(self.file)

    def named(self, text: str) -> str:
        """A text that names the table by where it lies in the end."""
        return text.replace(str(self.counted), str(self.file))


def _write(tuning: "Tuning", plan: "BenchPlan", output: Path, table: _NgramTable) -> None:
    """Writes the configuration, and keeps the n-gram table that was counted if it is used."""
    from outrider.lab.metadata import hardware
    from outrider.lab.tune.configuration import configuration_of, write_configuration

    names = ("dtype", "device", "compile", "kv_dtype", "exact", "quantize_target", "quantize_draft")
    defaults = {"dtype": None, "device": "auto", "compile": "off", "kv_dtype": "auto"}
    settings: dict[str, Any] = {
        name: getattr(plan, name)
        for name in names
        if getattr(plan, name) not in (None, False, defaults.get(name))
    }
    sampling = tuning.sampling or plan.sampling(plan.temperatures[0])
    found = configuration_of(tuning, plan.target, settings, hardware(), sampling)
    used = {name for choice in found.choices for name in choice.options.values()}
    if str(table.counted) in used:
        table.keep()
    write_configuration(found.with_options_renamed(table.named), output)
    say(f"wrote {output}")


def _title(plan: "BenchPlan") -> str:
    from outrider.lab.metadata import hardware

    name = plan.target if plan.target == EMBEDDED else Path(plan.target).name
    return f"{name} on {hardware()}, temperature {plan.temperatures[0]:g}"


def _check_files(output: Path, plot: Path | None) -> None:
    """Fails before anything is measured where a file cannot be written."""
    if plot is not None and plot.suffix not in _PICTURES:
        raise fail(f"--plot {plot}: must end in {' or '.join(_PICTURES)}")
    for flag, path in (("--output", output), ("--plot", plot)):
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise fail(f"{flag} {path}: is a folder; pass the name of a file")
        if not folder.is_dir():
            raise fail(f"{flag} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise fail(f"{flag} {path}: no permission to write there")
