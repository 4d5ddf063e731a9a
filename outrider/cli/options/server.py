"""Options of ``outrider serve``."""

from dataclasses import dataclass
from typing import Annotated

import typer

SERVER = "Server"
LIMITS = "Limits"
REPLICAS = "Replicas"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The target model, as --target names it; by default the embedded pair.",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The address to listen at; 0.0.0.0 lets other machines in.",
        rich_help_panel=SERVER,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=65535, help="The port; 0 takes a free one.", rich_help_panel=SERVER
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        envvar="OUTRIDER_API_KEY",
        help="A key that requests must have. May be repeated; the environment variable holds "
        "several, separated by spaces, and is not shown in lists of processes.",
        rich_help_panel=SERVER,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How clients call the model. Default: the name of the target.",
        rich_help_panel=SERVER,
    ),
]
SpeculationMetrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="summary or detailed: responses say how their tokens were drafted, also to requests "
        "that do not ask for it.",
        rich_help_panel=SERVER,
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Outputs that run at the same time.", rich_help_panel=LIMITS
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Outputs that wait; requests beyond get status 429.",
        rich_help_panel=LIMITS,
    ),
]
MaxMethods = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Methods, with their options, that requests may use at the same time; 1 lets them "
        "choose none. The memory limit is divided among as many.",
        rich_help_panel=LIMITS,
    ),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Most tokens of a prompt. Default: the model's context.",
        rich_help_panel=LIMITS,
    ),
]
MaxBodySize = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Most bytes of a request's body.", rich_help_panel=LIMITS),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Most seconds that a request may take; 0 is off.",
        rich_help_panel=LIMITS,
    ),
]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Seconds that running requests have to end after SIGTERM or Ctrl-C; 0 waits for all.",
        rich_help_panel=LIMITS,
    ),
]


SslCertfile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A certificate in PEM format, with which the server speaks HTTPS.",
        rich_help_panel=SERVER,
    ),
]
SslKeyfile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The certificate's private key, if it is in a file of its own.",
        rich_help_panel=SERVER,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="The origin of web pages that may call the server (CORS), such as "
        "https://chat.example.org; * is any. May be repeated.",
        rich_help_panel=SERVER,
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send OpenTelemetry traces there, such as http://localhost:4318/v1/traces.",
        rich_help_panel=SERVER,
    ),
]


StreamInterval = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Least seconds between two chunks of a stream; tokens that come sooner share one.",
        rich_help_panel=LIMITS,
    ),
]


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and to whom."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key: ApiKey = None
    served_model_name: ServedModelName = None
    speculation_metrics: SpeculationMetrics = None
    ssl_certfile: SslCertfile = None
    ssl_keyfile: SslKeyfile = None
    allowed_origins: AllowedOrigins = None
    otlp_traces_endpoint: OtlpTracesEndpoint = None


@dataclass(frozen=True)
class Limits:
    """How much a server does."""

    max_batch_size: MaxBatchSize = 16
    max_queue: MaxQueue = 256
    max_methods: MaxMethods = 4
    max_prompt_tokens: MaxPromptTokens = None
    max_body_size: MaxBodySize = "4MiB"
    request_timeout: RequestTimeout = 600.0
    shutdown_timeout: ShutdownTimeout = 60.0
    stream_interval: StreamInterval = 0.02


NumReplicas = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Serve N engines on Ray Serve, each in a process of its own. Requests that begin "
        "alike go to the same one. Needs the extra 'cluster'.",
        rich_help_panel=REPLICAS,
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The Ray cluster of --replicas, such as auto or HOST:6379; local starts Ray here.",
        rich_help_panel=REPLICAS,
    ),
]
CpusPerReplica = Annotated[
    float,
    typer.Option(
        metavar="N",
        min=0,
        help="Processors that a replica reserves on the cluster.",
        rich_help_panel=REPLICAS,
    ),
]
GpusPerReplica = Annotated[
    float,
    typer.Option(
        metavar="N",
        min=0,
        help="GPUs that a replica reserves on the cluster.",
        rich_help_panel=REPLICAS,
    ),
]


@dataclass(frozen=True)
class Replicas:
    """Several engines behind one address."""

    replicas: NumReplicas = None
    ray: Ray = "local"
    cpus_per_replica: CpusPerReplica = 1.0
    gpus_per_replica: GpusPerReplica = 0.0
