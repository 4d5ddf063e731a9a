"""``outrider serve --replicas``: several engines behind one address."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.cli.engines import load_arguments
from outrider.cli.errors import fail, say
from outrider.cli.options.models import Models
from outrider.cli.options.server import Limits, Listening, Replicas
from outrider.cli.options.speculation import Speculation
from outrider.cli.quiet import silence, silence_transformers

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.serve.settings import ServerSettings


@dataclass(frozen=True)
class ServedEngine:
    """How the engine of a server is loaded, in this process or in a replica's.

    Attributes:
        num_engines: engines of a machine that share its memory.
    """

    models: Models
    speculation: Speculation
    max_batch_size: int
    max_memory: str | None
    prefix_cache: str
    generation_config: bool
    num_engines: int

    def check(self) -> None:
        """Raises an error for sizes that are none."""
        from outrider.engine.admission import parse_bytes

        if self.max_memory is not None:
            parse_bytes(self.max_memory)
        if self.prefix_cache != "0":
            parse_bytes(self.prefix_cache, "prefix_cache")

    def limits(self) -> dict[str, Any]:
        """The engine's limits on the machine where this is called."""
        from outrider.engine.admission import parse_bytes
        from outrider.runtime.hf.load import resolve_device
        from outrider.runtime.kv_cache.storage import free_bytes

        if self.max_memory is None:
            num_bytes = free_bytes(resolve_device(self.models.device)) // 2
        else:
            num_bytes = parse_bytes(self.max_memory)
        kept = 0 if self.prefix_cache == "0" else parse_bytes(self.prefix_cache, "prefix_cache")
        return {
            "max_batch_size": self.max_batch_size,
            "max_memory": str(max(1, num_bytes // self.num_engines)),
            "prefix_cache": str(max(1, kept // self.num_engines)) if kept else None,
            "generation_config": self.generation_config,
        }

    def __call__(self) -> "Engine":
        """Loads the engine of a replica."""
        silence()
        from outrider.engine import load

        silence_transformers()
        return load(**load_arguments(self.models, self.speculation, **self.limits()))


def serve_replicas(
    loading: ServedEngine,
    settings: "ServerSettings",
    listening: Listening,
    limits: Limits,
    replicas: Replicas,
) -> None:
    """Serves on Ray Serve."""
    for given, option in (
        (listening.ssl_certfile, "--ssl-certfile"),
        (listening.otlp_traces_endpoint, "--otlp-traces-endpoint"),
    ):
        if given is not None:
            raise fail(f"{option} with --replicas: leave it out, or serve a single engine")
    if listening.port == 0:
        raise fail("--port 0 with --replicas: name the port")
    if limits.max_queue == 0:
        raise fail("--max-queue 0 with --replicas: Ray Serve lets 1 request wait at least")
    from outrider.cluster.connection import require_ray

    require_ray()
    from outrider.cluster.replicas.deployment import Fleet
    from outrider.cluster.replicas.run import run_replicas

    assert replicas.replicas is not None
    num_here = replicas.replicas if replicas.ray == "local" else 1
    if replicas.gpus_per_replica:
        num_here = math.ceil(1 / min(1.0, replicas.gpus_per_replica))
    fleet = Fleet(
        replicas.replicas,
        replicas.cpus_per_replica,
        replicas.gpus_per_replica,
        limits.max_batch_size,
    )

    def ready(url: str) -> None:
        say(
            f"serving {settings.model_name} by {fleet.num_replicas} replicas at {url}/v1: Ctrl-C "
            f"ends the server, SIGHUP restarts the replicas one by one"
        )

    run_replicas(
        replace(loading, num_engines=loading.num_engines * num_here),
        settings,
        fleet,
        listening.host,
        listening.port,
        address=replicas.ray,
        ready=ready,
    )
