"""``outrider batch``: answers a file of prompts."""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from outrider.cli.configuration import Config, configured
from outrider.cli.engines import load_arguments, public_name, require_draft_of
from outrider.cli.errors import FAILED, INTERRUPTED, fail, say
from outrider.cli.options.batch import BatchSpeculation, Fleet, Lines, Out, PromptsArgument
from outrider.cli.options.models import MaxMemory, Models
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
from outrider.cli.options.speculation import AUTO
from outrider.cli.progress import Progress
from outrider.cli.quiet import silence, silence_transformers
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.cluster.batch import LoadedModels, Summary
    from outrider.cluster.batch.answer import Answers
    from outrider.cluster.batch.blocks import Block
    from outrider.cluster.batch.run import Map

_MOST_SHOWN = 10


def batch(
    context: typer.Context,
    prompts: PromptsArgument,
    output: Out,
    *,
    lines: Lines,
    fleet: Fleet,
    models: Models,
    max_memory: MaxMemory = None,
    speculation: BatchSpeculation,
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
) -> None:
    """Answer a file of prompts, millions of them: every line once, in order.

    A line is {"prompt": "..."}, {"messages": [...]}, or a request in the format of OpenAI's
    batches, {"custom_id": "...", "body": {...}}. Answer user messages by two worker processes:

      outrider batch prompts.jsonl -o answers.jsonl --chat --workers 2 \\
        --target HuggingFaceTB/SmolLM2-135M-Instruct --method suffix

    The same command continues a run that was interrupted, and loses nothing. Lines that are
    malformed are reported with their numbers, and the others are answered. On a Ray cluster:

      outrider batch prompts.jsonl -o answers.jsonl --workers 64 --ray auto \\
        --gpus-per-worker 1
    """
    if lines.system is not None and not lines.chat:
        raise fail("--system is the system prompt of --chat: add --chat")
    biases = parse_logit_bias(logit_bias)
    chosen, method, tuned = configured(context, models, speculation, config, fleet.batch_size)
    require_draft_of(method.method, chosen)
    start("outrider.cluster.batch.run")
    from outrider.cluster.batch import Asking, LoadedModels, run_batch

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
    )
    if tuned is not None:
        tuned.note_sampling(sampling)
    name = public_name(chosen.target)
    loaded = LoadedModels(
        load_arguments(
            chosen,
            method if method.method == AUTO else method.with_fixed_length,
            max_batch_size=fleet.batch_size,
            max_memory=max_memory,
            generation_config=not no_generation_config,
        ),
        Asking(sampling, lines.chat, lines.system, lines.served_model_name or name),
        num_workers=0 if fleet.ray else fleet.workers,
    )
    begin = time.monotonic()
    try:
        with Progress(time_left=True) as progress:
            progress.show("loading the models")
            summary = run_batch(
                prompts,
                output,
                _map(loaded, fleet),
                loaded.contents,
                block_lines=fleet.block_lines,
                overwrite=lines.overwrite,
                report=lambda done, total: progress.show(
                    f"{done:,} of {total:,} lines", done / total
                ),
            )
    except KeyboardInterrupt:
        say("interrupted: what is answered is kept; run the same command again to continue")
        raise typer.Exit(INTERRUPTED) from None
    _say_summary(summary, output, time.monotonic() - begin)
    if summary.num_errors:
        raise typer.Exit(FAILED)


def _map(loaded: "LoadedModels", fleet: Fleet) -> "Map":
    """What answers blocks."""
    from outrider.cluster.batch import in_processes, through_ray
    from outrider.cluster.connection import require_ray

    start = _Quietly(pickle.dumps(loaded))
    if fleet.ray is None:
        return partial(in_processes, start, num_workers=fleet.workers)
    require_ray()
    return partial(
        through_ray,
        start,
        num_workers=fleet.workers,
        address=fleet.ray,
        num_cpus=fleet.cpus_per_worker,
        num_gpus=fleet.gpus_per_worker,
    )


@dataclass(frozen=True)
class _Quietly:
    """Loads a worker's models after libraries are silenced, which unpickling the models' loader
    imports."""

    pickled: bytes

    def __call__(self, number: int) -> "Callable[[Block], Answers]":
        silence()
        loaded: LoadedModels = pickle.loads(self.pickled)
        silence_transformers()
        return loaded(number)


def _say_summary(summary: "Summary", output: object, seconds: float) -> None:
    for number, message in summary.errors[:_MOST_SHOWN]:
        say(f"line {number}: {message}")
    if summary.num_errors > _MOST_SHOWN:
        say(f"and {summary.num_errors - _MOST_SHOWN:,} more lines without an answer")
    resumed = f" ({summary.num_resumed:,} of them before)" if summary.num_resumed else ""
    failed = f", {summary.num_errors:,} with an error" if summary.num_errors else ""
    say(
        f"{output}: {summary.num_lines:,} lines{resumed}{failed}; {summary.num_tokens:,} tokens "
        f"in {seconds:.1f} s"
    )
