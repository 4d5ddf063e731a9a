"""``outrider bench``: compares methods on the user's models and prompts."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.configuration import Config, TunedMethod, bench_values
from outrider.cli.errors import INTERRUPTED, fail, say
from outrider.cli.options.bench import (
    AsJson,
    BenchModels,
    Energy,
    Folder,
    Grid,
    Plan,
    Prompting,
    Report,
    Run,
    RunGeneratedCode,
)
from outrider.cli.options.models import EMBEDDED
from outrider.cli.progress import Progress
from outrider.cli.report import check_page, write_page
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab import bench as lab

DEFAULT_METHOD, DEFAULT_DATA = "speculative", "builtin:code"


def bench(
    plan: Plan = None,
    *,
    grid: Grid,
    prompting: Prompting,
    run: Run,
    models: BenchModels,
    energy: Energy = False,
    run_generated_code: RunGeneratedCode = False,
    config: Config = None,
    output: Folder = Path("bench"),
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods on your models and your prompts.

    Runs every method at every draft length, temperature, data set and batch size, and plain
    decoding as the baseline: all cells once, in random order, then all again. Prints tokens per
    second, speed-ups with 95 % intervals, and acceptance. On the embedded pair, about two minutes:

      outrider bench --method speculative --method mentored:budget=0.2

    A pair and prompts of your own, at two draft lengths:

      outrider bench --target big/ --draft small/ --data prompts.jsonl \\
        --method speculative --method block --gamma 3 --gamma 5

    An interrupted run, with Ctrl-C or otherwise, goes on where it stopped when the same command is
    given again. All of it can be written into a plan instead:

      outrider bench --plan plan.toml -o results/
    """
    start("outrider.lab.bench")
    from outrider.lab import bench as lab

    values, tuned = _values(plan, grid, prompting, run, models, config)
    if energy:
        meters = values.get("meters", [])
        values["meters"] = [*(meters if isinstance(meters, list) else [meters]), "energy"]
    planned = lab.plan_of(values)
    if tuned is not None:
        for temperature in planned.temperatures:
            tuned.note_sampling(planned.sampling(temperature))
    _check_writable(output)
    if report is not None:
        check_page(report, "--report")
    try:
        with _consent(run_generated_code), Progress(quiet=as_json) as progress:
            results = lab.run_bench(planned, lambda at: _show(progress, at), folder=output)
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on from {output / 'journal.jsonl'}")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        for result in results:
            typer.echo(lab.as_line(result))
    else:
        from outrider.cli.bench_table import show

        show(results)
    say(f"wrote {output / 'cells.jsonl'}")
    if report is not None:
        write_page(results, report)


def _consent(given: bool) -> AbstractContextManager[None]:
    """The context within which metrics may run generated code, if the user allows it."""
    if not given:
        return nullcontext()
    from outrider.lab.sandbox import allow_generated_code

    return allow_generated_code()


def _values(
    plan: Path | None,
    grid: Grid,
    prompting: Prompting,
    run: Run,
    models: BenchModels,
    config: Path | None,
) -> tuple[dict[str, Any], TunedMethod | None]:
    """The plan's values: those of its file, replaced by the options that were given. A plan says
    all that is compared, so that it means the same in every working directory. Without one, or
    where the user names a configuration, what is missing is as the configuration has it, whose
    method is also returned if it is measured."""
    from outrider.lab.bench import read_plan

    values = {} if plan is None else read_plan(plan)
    values |= grid.given() | run.given() | models.given()
    tuned = None
    if plan is None or config is not None:
        values, tuned = bench_values(config, values)
    values.setdefault("methods", [DEFAULT_METHOD])
    values["data"] = prompts_of(values, prompting)
    return values, tuned


def prompts_of(values: dict[str, Any], prompting: Prompting) -> list[Any]:
    """The data sets of a plan, with the options that concern all of them."""
    sources = prompting.data or values.get("data")
    if not sources and values.get("target", EMBEDDED) == EMBEDDED:
        sources = [DEFAULT_DATA]
    if not sources:
        raise fail(
            "no prompts: pass --data FILE with prompts like those that the models will get, such "
            "as a text with one per line"
        )
    listed = sources if isinstance(sources, list) else [sources]
    options = {"limit": prompting.limit, "tasks": prompting.task, "prompts": prompting.prompts}
    given = {name: value for name, value in options.items() if value}
    if not given:
        return listed
    return [({"source": each} if isinstance(each, str) else each) | given for each in listed]


def _show(progress: Progress, at: "lab.Progress") -> None:
    left = "" if at.seconds_left is None else f", {_duration(at.seconds_left)} left"
    share = at.done / at.total if at.total else None
    progress.show(f"{at.done}/{at.total}{left}: {at.stage}" if at.total else at.stage, share)


def _duration(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(f"cannot write to --output '{folder}': {error.strerror or error}") from error
