"""Sharded targets on the command line: ``torchrun -m outrider generate`` starts the command on
every rank; rank 0 runs it, and the other ranks follow."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import typer

from outrider.cli.errors import fail
from outrider.cli.options.models import Models
from outrider.cli.options.sharding import REPLICATED, Sharding
from outrider.cli.options.speculation import Speculation
from outrider.cli.progress import Progress
from outrider.cli.start import start
from outrider.cluster.sharded.launch import Launch, check_size

if TYPE_CHECKING:
    from outrider.cluster.sharded import Placement, Ranks
    from outrider.cluster.sharded.engine import ShardedEngine
    from outrider.runtime.kv_cache.storage import KvDtype

COMMANDS = ("generate", "sharding")
"""The commands that torchrun may start."""


def check_command(command: str | None) -> None:
    """Fails where torchrun starts a command that does not shard its target."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if several and command not in COMMANDS:
        raise fail(
            f"torchrun can start outrider {' and outrider '.join(COMMANDS)}, not outrider "
            f"{command}: run that without torchrun"
        )


def is_sharded(sharding: Sharding) -> bool:
    """Whether the target is to be split, among as many processes as were started.

    Raises:
        BadInputError: options that need several processes, where there is one.
    """
    launch = Launch.of_environment()
    check_size(sharding.tensor_parallel, launch)
    several = launch is not None and launch.size > 1
    if sharding.draft_placement != REPLICATED and not several:
        raise fail(
            f"--draft-placement {sharding.draft_placement} needs several processes: start "
            f"torchrun --nproc-per-node N -m outrider generate"
        )
    return several


def follows() -> bool:
    """Whether this process is a rank other than 0."""
    launch = Launch.of_environment()
    return launch is not None and launch.rank > 0


def open_sharded(
    context: typer.Context,
    sharding: Sharding,
    models: Models,
    speculation: Speculation,
    *,
    max_memory: str | None = None,
    generation_config: bool = True,
) -> "ShardedEngine":
    """Rank 0's engine, whose followers end with the command. Other ranks follow here until then,
    and exit.

    Args:
        context: of the command.
        sharding, models, speculation: the options.
        max_memory, generation_config: as for ``outrider.load``.

    Raises:
        OutriderError: as ``outrider.cluster.sharded.run`` says.
    """
    start("outrider.cluster.sharded.entry")
    from outrider.cluster.sharded.lockstep import Follower, leading

    stack = context.with_resource(ExitStack())
    engine = stack.enter_context(
        joined_engine(
            sharding,
            models,
            speculation,
            max_memory=max_memory,
            generation_config=generation_config,
        )
    )
    if engine.ranks.leads:
        stack.enter_context(leading(engine.ranks))
        return engine
    with stack:
        Follower(engine.ranks, engine.new_scheduler()).follow()
    raise typer.Exit()


@contextmanager
def joined_engine(
    sharding: Sharding,
    models: Models,
    speculation: Speculation,
    *,
    max_memory: str | None = None,
    generation_config: bool = True,
) -> Iterator["ShardedEngine"]:
    """The engine of this rank, among the processes that torchrun started."""
    from outrider.cluster.sharded import joined

    launch = Launch.of_environment()
    assert launch is not None
    with joined(launch, sharding.rank_timeout) as ranks:
        yield _loaded(ranks, sharding, models, speculation, max_memory, generation_config)


def _loaded(
    ranks: "Ranks",
    sharding: Sharding,
    models: Models,
    speculation: Speculation,
    max_memory: str | None,
    generation_config: bool,
) -> "ShardedEngine":
    """The engine of this rank."""
    from outrider.cluster.sharded import load

    with Progress() as progress:
        return load(
            ranks,
            models.target,
            models.draft,
            speculation.method,
            speculation.num_speculative_tokens,
            draft_placement=cast("Placement", sharding.draft_placement),
            options=speculation.options,
            draft_confidence=speculation.draft_confidence,
            draft_length=speculation.draft_length,
            max_batch_size=1,
            dtype=None if models.dtype == "auto" else models.dtype,
            device=models.device,
            trust_remote_code=models.trust_remote_code,
            quantize_draft=models.quantize_draft,
            quantize_target=models.quantize_target,
            kv_dtype=cast("KvDtype", models.kv_dtype),
            max_memory=max_memory,
            compile=models.compile,
            exact=models.exact,
            generation_config=generation_config,
            report=progress.show if ranks.leads else None,
        )
