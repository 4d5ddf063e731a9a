"""A benchmark's plan: methods × draft lengths × temperatures × data sets × batch sizes.

Plain decoding, the baseline, always runs at each temperature, data set and batch size.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.values import check_choice, check_flag, is_finite, is_whole, shown
from outrider.drafters.heads.kinds import format_of
from outrider.engine.settings import check_range, check_speculative_tokens
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.data import PROMPTS, Prompts
from outrider.runtime.executors.compiled import Compile, check_compile
from outrider.sampling import Sampling

EMBEDDED = "embedded"
MAX_BATCH = 65536


@dataclass(frozen=True)
class DataSpec:
    """A data set of a plan.

    Attributes:
        source: as ``read_data`` takes it.
        name: in tables; empty takes the file's.
        tasks: the tasks to keep; empty keeps all.
        limit: most examples of each task, spread evenly over the file; None keeps all.
        prompts: ``auto``, ``chat`` or ``text``; see ``lab/data/prompts.py``.
        forced: whether the reference answers are the outputs, whatever the models predict.
    """

    source: str
    name: str = ""
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    prompts: Prompts = "auto"
    forced: bool = False

    def __post_init__(self) -> None:
        check_flag("forced", self.forced)
        if not isinstance(self.source, str) or not self.source:
            raise InvalidParameterError(
                f"data={shown(self.source)}: must be a file, builtin:NAME or hf:NAME:SPLIT:FIELD"
            )
        if self.limit is not None:
            check_range("limit", self.limit, 1 << 31)
        check_choice("prompts", self.prompts, PROMPTS)


@dataclass(frozen=True)
class BenchPlan:
    """What a benchmark measures.

    Attributes:
        target: folder or hub id of the target, ``embedded``, or a name among the models that
            ``run_bench`` is given.
        drafts: draft models and heads, likewise; each method runs with each that fits it.
        methods: what is compared; the baseline is added where it is missing.
        gammas: draft lengths; None is the method's own. Methods that set ``gamma`` keep it.
        temperatures: 0 is greedy.
        top_k, top_p, min_p: truncation at every temperature above 0.
        data: the data sets.
        batch_sizes: requests that start together and run in one batch.
        repeats: timed repeats of each cell.
        max_repeats: most repeats of a cell whose speed-up is not steady; see ``lab/bench/run.py``.
        warmup: examples that each method continues before it is timed.
        seed: of the first repeat; repeat r has ``seed + r``. Also of the order of the cells.
        max_new_tokens: of each output.
        ignore_eos: continue past the end of sequence, so that all outputs have equal lengths.
        stop: strings that end an output.
        metrics: names of registered metrics.
        meters: names of registered meters.
        dtype, device, compile, exact, kv_dtype, quantize_target, quantize_draft,
            trust_remote_code: as the arguments of ``outrider.load``.
        threads: of torch; None leaves them.
        generation_config: whether outputs obey the target's generation config.
        remember: whether methods that copy from earlier outputs keep these from repeat to repeat,
            as a server does whose users ask the same again. Otherwise each repeat begins without.
        baseline: what the speed-ups are relative to.

    Raises:
        InvalidParameterError: a value outside its domain.
        IncompatibleError: a method for temperature 0 only, with other temperatures; a method
            without the draft it needs.
    """

    methods: tuple[MethodSpec, ...]
    data: tuple[DataSpec, ...]
    target: str = EMBEDDED
    drafts: tuple[str, ...] = ()
    gammas: tuple[int | None, ...] = (None,)
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    max_repeats: int = 9
    warmup: int = 1
    seed: int = 0
    max_new_tokens: int = 64
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    meters: tuple[str, ...] = ()
    dtype: str | None = None
    device: str = "auto"
    compile: Compile = "off"
    exact: bool = False
    kv_dtype: str = "auto"
    quantize_target: str | None = None
    quantize_draft: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    generation_config: bool = False
    remember: bool = False
    baseline: MethodSpec = field(default_factory=lambda: MethodSpec("plain"))

    def __post_init__(self) -> None:
        for name in ("methods", "data", "gammas", "temperatures", "batch_sizes"):
            if not getattr(self, name):
                raise InvalidParameterError(f"{name}: the plan has none; give at least one")
        for gamma in self.gammas:
            check_speculative_tokens(gamma, "gammas")
        for size in self.batch_sizes:
            check_range("batch_sizes", size, MAX_BATCH)
        for name, least in (("repeats", 1), ("max_repeats", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise InvalidParameterError(
                    f"{name}={shown(value)}: must be a whole number from {least}"
                )
        if self.max_repeats < self.repeats:
            raise InvalidParameterError(
                f"max_repeats={self.max_repeats}: must be at least repeats={self.repeats}"
            )
        if self.threads is not None:
            check_range("threads", self.threads, 4096)
        check_compile(self.compile)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("remember", self.remember)
        for temperature in self.temperatures:
            self.sampling(temperature)
        for what in ("methods", "gammas", "temperatures", "batch_sizes"):
            _check_distinct(what, [str(each) for each in getattr(self, what)])
        self._check_temperatures()
        for method in self.all_methods:
            self.drafts_of(method)
        if len(self.drafts_of(self.baseline)) * len(self.gammas_of(self.baseline)) > 1:
            raise InvalidParameterError(
                f"baseline={str(self.baseline)!r}: it has several draft lengths or drafts in this "
                f"plan; set its own, such as {self.baseline.name}:gamma=5"
            )

    def sampling(self, temperature: float, repeat: int = 0) -> Sampling:
        """The sampling parameters at a temperature, in one of the repeats."""
        return Sampling(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + repeat,
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
        )

    @property
    def all_methods(self) -> tuple[MethodSpec, ...]:
        """The methods, with the baseline first."""
        others = (each for each in self.methods if str(each) != str(self.baseline))
        labelled = (each for each in self.methods if str(each) == str(self.baseline))
        return (next(labelled, self.baseline), *others)

    def drafts_of(self, spec: MethodSpec) -> tuple[str | None, ...]:
        """The drafts that a method runs with: its own, or all of the plan's that are of its kind;
        None for a method without a draft.

        Raises:
            IncompatibleError: it needs a draft, and the plan has none of the kind.
        """
        kind = "model" if spec.method.needs_draft else spec.method.needs_head
        if kind is None:
            return (None,)
        if spec.draft is not None:
            return (spec.draft,)
        found = tuple(draft for draft in self.drafts if _kind_of(draft) in (kind, None))
        if found:
            return found
        if kind == "model" and self.target == EMBEDDED:
            return (EMBEDDED,)
        what = "a draft model" if kind == "model" else f"a head of kind {kind!r}"
        raise IncompatibleError(
            f"method {str(spec)!r} needs {what}, and the plan has none: add one to drafts, or "
            f"leave the method out"
        )

    def gammas_of(self, spec: MethodSpec) -> tuple[int | None, ...]:
        """The draft lengths that a method runs with."""
        if not spec.drafts:
            return (None,)
        return self.gammas if spec.gamma is None else (spec.gamma,)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON, with methods in their text form."""
        values = asdict(self)
        values["methods"] = [{"method": str(each), "label": each.label} for each in self.methods]
        values["baseline"] = str(self.baseline)
        return values

    def _check_temperatures(self) -> None:
        sampled = [each for each in self.temperatures if each > 0]
        for spec in self.methods:
            if sampled and spec.method.recipe(spec.options).greedy_only:
                raise IncompatibleError(
                    f"method {str(spec)!r} is defined at temperature 0 only, and the plan has "
                    f"temperature {sampled[0]:g}: leave out one of them"
                )


def _kind_of(draft: str) -> str | None:
    """``model``, the kind of a head, or None where the name says nothing yet."""
    head = format_of(draft)
    return "model" if head is None else head.kind


def _check_distinct(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InvalidParameterError(f"{what}: {value} is there twice; give it once")
        seen.add(value)


# ----------------------------------------------------------------------- from names and values


def plan_of(values: Mapping[str, Any]) -> BenchPlan:
    """A plan from values as TOML or a command line has them: methods and data sets as texts or
    tables, lists where the plan has tuples, numbers alone where it has one-element lists.

    Raises:
        InvalidParameterError: an unknown name, or a value outside its domain.
    """
    known = {each.name for each in fields(BenchPlan)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidParameterError(
                f"plan: unknown setting {name!r}; {hint}known: {', '.join(sorted(known))}"
            )
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name == "methods":
            read[name] = tuple(_method_of(each) for each in _listed(value))
        elif name == "baseline":
            read[name] = _method_of(value)
        elif name == "data":
            read[name] = tuple(_data_of(each) for each in _listed(value))
        elif name in _TUPLES:
            read[name] = tuple(_number_of(name, each) for each in _listed(value))
        else:
            read[name] = value
    for name in ("methods", "data"):
        read.setdefault(name, ())
    if is_whole(read.get("repeats")):
        read.setdefault("max_repeats", max(BenchPlan.max_repeats, read["repeats"]))
    return BenchPlan(**read)


_TUPLES = ("drafts", "gammas", "temperatures", "batch_sizes", "stop", "metrics", "meters")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _number_of(name: str, value: Any) -> Any:
    """A temperature of 0 is 0.0; γ 0 or "default" is the method's own."""
    if name == "gammas" and value == "default":
        return None
    if name == "temperatures":
        if not is_finite(value):
            raise InvalidParameterError(f"temperatures={shown(value)}: must be numbers from 0")
        return float(value)
    return value


def _method_of(value: Any) -> MethodSpec:
    if isinstance(value, MethodSpec):
        return value
    if isinstance(value, str):
        return MethodSpec.parse(value)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        values = {key: each for key, each in value.items() if key not in ("name", "options")}
        return MethodSpec.of(value["name"], {**values, **value.get("options", {})})
    raise InvalidParameterError(
        f"methods={shown(value)}: must be such as 'mentored:budget=0.2', or a table with a name"
    )


def _data_of(value: Any) -> DataSpec:
    if isinstance(value, DataSpec):
        return value
    if isinstance(value, str):
        return DataSpec(value)
    if isinstance(value, Mapping) and "source" in value:
        allowed = [each.name for each in fields(DataSpec)]
        for key in value:
            if key not in allowed:
                raise InvalidParameterError(
                    f"data: unknown setting {key!r}; known: {', '.join(allowed)}"
                )
        given = dict(value) | {"tasks": tuple(_listed(value.get("tasks", ())))}
        return DataSpec(**cast("dict[str, Any]", given))
    raise InvalidParameterError(
        f"data={shown(value)}: must be a file, builtin:NAME, hf:NAME:SPLIT:FIELD, or a table with "
        f"a source"
    )
