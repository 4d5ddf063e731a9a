"""The engine: one target, one method, any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from outrider.core.errors import PromptError
from outrider.core.protocols import Drafter, Verifier
from outrider.drafters.chain.draft_length import DraftLength
from outrider.drafters.chain.none import NoDraft
from outrider.drafters.heads.head import Head
from outrider.engine.assembly import assemble, check_parts, drafter_of
from outrider.engine.chat import Message, check_messages
from outrider.engine.dispatcher import Dispatcher, reader
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.hints import ChatHint
from outrider.engine.prompt_logprobs import PromptLogprobs, prompt_logprobs
from outrider.engine.prompts import Array, Prompt, Prompts, read_prompt
from outrider.engine.request import Event, Request, Result, Results, Row
from outrider.engine.request_builder import RequestBuilder
from outrider.engine.round_observer import Observed
from outrider.engine.running_batch import RunningBatch
from outrider.engine.scheduler import BatchKind, Scheduler
from outrider.engine.settings import AUTO, AUTO_REPEATABLE, LengthPolicy, Settings
from outrider.engine.shared_programs import SharedPrograms
from outrider.engine.speculation import Speculation, SpeculationReader
from outrider.methods import METHODS, Method, Recipe
from outrider.runtime import HFModel
from outrider.runtime.busy_processors import sharing_processors
from outrider.runtime.hf.eos import eos_ids
from outrider.runtime.hf.generation_config import check_demands, obeyed
from outrider.runtime.kernels import ignores_threads
from outrider.runtime.kv_cache.storage import KvDtype
from outrider.sampling import Sampling

if TYPE_CHECKING:
    from outrider.engine.background import BackgroundCompiler
    from outrider.engine.late_kernels import LateKernels
    from outrider.train.online import Adaptation, AdaptSettings

T = TypeVar("T")


class Engine:
    """Generates text by one method; build it with :func:`outrider.load`.

    An engine may be used from several threads and asyncio tasks. All their requests share its
    batches; under ``max_memory``, requests wait until their KV buffers fit. A model may be shared
    by several engines.

    Args:
        target: the model whose distribution the output has.
        draft: the model that drafts ahead, or the head, where the method needs one.
        method: a row of ``outrider.methods``.
        num_speculative_tokens: γ, most tokens drafted per round (of a tree: its most levels), 1
            to 64; None takes the drafter's own depth if it has one, such as a tree's, else 5.
            ``auto`` lets the governor choose, round by round, how many pay, none included, by the
            times and the acceptance that it measures (``engine/governor``); at temperatures above
            0 the tokens of a seed then depend on the machine's speed, unless the method is
            ``coupled``. ``auto-repeatable`` does so unless a sampled request in the batch has a
            seed; the batch then drafts as with None, so that the seed has one output. ``fixed`` is
            None.
        draft_confidence: stop drafting after a token less probable than this; 0 never.
        draft_length: ``fixed``; ``heuristic[:START]``, which grows by two where all of a draft was
            accepted and else shrinks by one; ``confidence:C``; ``survival:THETA``, which stops
            once the drafted tokens' joint probability is below 1 - θ; or a table of γ by the number
            of running rows, such as ``[[1, 4, 6], [5, 16, 3], [17, 64, 0]]``, which ``table:``
            precedes in a string.
        max_batch_size: rows that run at the same time; more requests wait for a free row.
        max_memory: most bytes of KV buffers, target's and draft's together; a number, or a
            string such as ``512MiB`` or ``2GB``. Requests wait until theirs fit.
        prefix_cache: most bytes of keys and values of ended sequences, target's and draft's
            together, that are kept for prompts that begin as these did, such as ``512MiB``. The
            next request of a conversation then reads its new tokens only. None keeps nothing. The
            sequences unused for longest are dropped first; all are where a request needs their
            memory. Of no effect, after a warning, with an encoder-decoder, and with drafters that
            read the target's hidden states of the whole prompt.
        kv_dtype: how KV buffers store numbers: ``auto`` (as the models do), ``bfloat16`` or
            ``int8`` (a scale per token and head); see ``runtime/kv_cache/storage.py`` for the
            error. In the target's KV buffers it changes the distribution that is sampled; in the
            draft's it does not.
        options: the method's own parameters by name, such as ``{"budget": 0.2}``.
        verifier: a verification rule of your own in place of the method's.
        measure: measure how far a lossy rule diverges from the target, for ``result.stats``; costs
            a few operations over the vocabulary per drafted token.
        generation_config: obey the target's generation config, as ``generate`` of ``transformers``
            does: its values where ``Sampling`` leaves a parameter None, and its rules
            (``bad_words_ids``, say) for every output; see ``runtime/hf/generation_config.py``.
            False ignores it, except for its end-of-sequence tokens.

    Attributes:
        kv_dtype: as given.
        limit: longest sequence in tokens, prompt included: the target's context.
        shared_limit: longest sequence that every model has room for; longer rows go on without
            drafts.
        obeyed: the values of the generation config that change outputs, by name.
        prefixes: what ``prefix_cache`` keeps; None without it. ``prefixes.clear()`` drops it,
            which a change of a model's weights requires.
        observed: who watches the rounds.
        governor: what ``num_speculative_tokens="auto"`` has learned; ``governor.beliefs(rows)``
            shows it. None where γ is given.

    Raises:
        InvalidParameterError: a number outside its range, an option the method does not have.
        IncompatibleError: a method without the draft model or head it needs, a head of another
            target, a rule that cannot verify it.
        VocabularyMismatchError: draft and target with different vocabularies, where the method
            needs equal ones.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel | Head | None,
        method: Method,
        *,
        num_speculative_tokens: int | Literal["auto", "auto-repeatable", "fixed"] | None = None,
        draft_confidence: float = 0.0,
        draft_length: str | Sequence[Sequence[int]] | DraftLength | None = "fixed",
        max_batch_size: int = 16,
        max_memory: int | str | None = None,
        prefix_cache: int | str | None = None,
        kv_dtype: KvDtype = "auto",
        options: Mapping[str, object] | None = None,
        verifier: Verifier | None = None,
        measure: bool = True,
        generation_config: bool = True,
    ) -> None:
        check_parts(target, draft, method)
        settings = Settings.checked(
            method,
            num_speculative_tokens=num_speculative_tokens,
            draft_confidence=draft_confidence,
            draft_length=draft_length,
            max_batch_size=max_batch_size,
            max_memory=max_memory,
            prefix_cache=prefix_cache,
            kv_dtype=kv_dtype,
            options=options,
            verifier=verifier,
            measure=measure,
            generation_config=generation_config,
        )
        self._models = target, draft
        parts = assemble(target, draft, method, settings)
        self.target = parts.target
        self.draft = parts.draft
        self.drafter = parts.drafter
        self.method = method
        self.recipe = settings.recipe
        self.num_speculative_tokens = parts.num_speculative_tokens
        self.governor = parts.governor
        self.max_batch_size = settings.max_batch_size
        self.kv_dtype = settings.kv_dtype
        self.measure = settings.measure
        self.verification = parts.verification
        self.limit = parts.target.limit
        self.shared_limit = min(model.limit for model in parts.models)
        self.prompt_limit = parts.target.prompt_limit
        self.eos_ids = eos_ids(parts.target)
        self.generation_config = generation_config
        self.obeyed: dict[str, object] = {}
        if generation_config:
            check_demands(parts.target.generation_config, parts.target.name)
            self.obeyed = obeyed(parts.target.generation_config)
        self._builder = RequestBuilder(
            parts.target,
            method,
            settings.recipe,
            SpeculationReader(method, settings.recipe, parts.num_speculative_tokens),
            drafts=parts.drafter.capabilities.drafts,
            eos_ids=self.eos_ids,
            obeyed=self.obeyed,
            memory=parts.memory,
        )
        self._memory = parts.memory
        self.prefixes = parts.prefixes
        self._settings = settings
        self.observed = Observed()
        self._programs = SharedPrograms()
        self._num_changes = 0
        self._hint = ChatHint.of(parts.target.tokenizer)
        self._dispatcher = Dispatcher(self.new_scheduler)

    @property
    def verifier(self) -> Verifier:
        """The rule for a batch in which some row samples."""
        return self.recipe.verifier

    def verifier_at(self, temperature: float) -> Verifier:
        """The rule that verifies a request at this temperature."""
        return _verifier(self.recipe, temperature == 0)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        prompts: str,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
        request_numbers: int | None = None,
        speculation: Speculation | None = None,
    ) -> Result: ...
    @overload
    def generate(  # type: ignore[overload-overlap]  # a Tensor is an Iterable[Tensor], too
        self,
        prompts: Array | Mapping[str, Any] | Sequence[Message],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
        request_numbers: int | Iterable[int] | None = None,
        speculation: Speculation | Iterable[Speculation | None] | None = None,
    ) -> Result | Results: ...
    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
        request_numbers: Iterable[int] | None = None,
        speculation: Speculation | Iterable[Speculation | None] | None = None,
    ) -> Results: ...
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
        request_numbers: int | Iterable[int] | None = None,
        speculation: Speculation | Iterable[Speculation | None] | None = None,
    ) -> Result | Results:
        """Continues one prompt or thousands.

        Args:
            prompts: one prompt: a string, a list of chat messages, a 1-D tensor or array of token
                ids, or a tokenizer's output with 1-D ``input_ids``. Or a batch: an iterable of
                prompts and lists of token ids, a 2-D tensor or array, or a tokenizer's output with
                2-D ``input_ids``. Padding is removed where ``attention_mask`` says so.
            sampling: for all prompts, or one per prompt; the default is ``Sampling()``.
            add_special_tokens: whether the tokenizer adds its special tokens to strings. A string
                that already begins with the beginning-of-sequence token does not get a second one.
            request_numbers: a number per prompt, from 0 to 2⁶⁴ - 1. Seed and number together are
                the key of a request's random numbers. By default the number is derived from the
                prompt, and from how often the same prompt stands before it in this call.
            speculation: draft length, method and divergence budget of the requests' own, for all
                prompts or one per prompt; None takes the engine's. All run in one batch.

        Returns:
            A :class:`Result` for a prompt alone, else :class:`Results` in the order of the prompts.

        Raises:
            PromptError: what is no prompt, an empty one, one longer than the context, token ids out
                of range.
            InvalidParameterError: sampling parameters that are none, or do not fit the model.
            NonFiniteLogitsError: a model produced NaN or infinite logits.
            DeadEndError: a request's parameters left no token to sample.
            OutOfMemoryError: the KV buffers do not fit: those of one request alone, before any
                runs, or all of them, where ``max_memory`` is not set.

        An error of one request does not stop the others. Once all are over, the first error in the
        order of the prompts is raised; its attribute ``results`` holds the results of the other
        prompts, and None for each prompt that failed.
        """
        requests, single = self._builder.batch(
            prompts, sampling, add_special_tokens, request_numbers, speculation
        )
        rows = self._dispatcher.finished_rows(requests)
        if self._hint is not None:
            for row in rows:
                self._hint(row)
        results = [None if row.error else row.result() for row in rows]
        if failed := [row.error for row in rows if row.error]:
            failed[0].results = tuple(results)  # type: ignore[attr-defined]
            raise failed[0]
        finished = Results(result for result in results if result is not None)
        return finished[0] if single else finished

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        request_number: int | None = None,
        speculation: Speculation | None = None,
    ) -> Result:
        """The assistant's answer to a conversation, by the tokenizer's chat template.

        A conversation is a prompt like any other: :meth:`generate`, :meth:`stream` and their
        relatives take lists of messages, too. An engine with ``prefix_cache`` reads only those
        tokens of a conversation that its last request did not have.

        Args:
            messages: such as ``[{"role": "user", "content": "Hello!"}]``.
            sampling: as for :meth:`generate`.
            request_number: as for :meth:`stream`.
            speculation: as for :meth:`generate`.

        Raises:
            PromptError: no messages, one without role or content, a model without a tokenizer or a
                chat template, or a conversation that the template refuses.
        """
        conversation = check_messages(messages)
        numbers = None if request_number is None else [request_number]
        return self.generate(
            [conversation], sampling, request_numbers=numbers, speculation=speculation
        )[0]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
        request_number: int | None = None,
        speculation: Speculation | None = None,
    ) -> Iterator[Event]:
        """Continues one prompt, an event per round; log-probabilities included.

        The request starts when the first event is asked for, and shares a batch with all others of
        this engine, whichever thread makes them. A caller that waits for an event runs the rounds
        of all.
        Closing the iterator, or an exception such as Ctrl-C, ends this request only. Arguments, and
        errors before the first event, as those of :meth:`generate`.
        """
        request = self._builder.single(
            prompt,
            sampling,
            add_special_tokens,
            request_number,
            with_logprobs=True,
            speculation=speculation,
        )
        return self._hinted(self._dispatcher.rounds_of(request, Row.event))

    async def stream_async(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
        request_number: int | None = None,
        speculation: Speculation | None = None,
    ) -> AsyncIterator[Event]:
        """As :meth:`stream`, for asyncio: ``async for event in engine.stream_async(prompt)``.

        Rounds run in threads of the event loop's default executor, never in the loop's own.
        Cancelling the task ends the request.
        """
        request = self._builder.single(
            prompt,
            sampling,
            add_special_tokens,
            request_number,
            with_logprobs=True,
            speculation=speculation,
        )
        with self._dispatcher.subscribe([request], reader(Row.event)) as subscription:
            while (item := await asyncio.to_thread(subscription.next)) is not None:
                _, (row, event) = item
                if self._hint is not None:
                    self._hint(row)
                yield event

    def run(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
        request_number: int | None = None,
        speculation: Speculation | None = None,
    ) -> Iterator[Row]:
        """As :meth:`stream`, but gives the row after each round: its tokens and statistics so far,
        and, by ``row.event()``, what was added.

        The row is the one that runs: while other calls run rounds of the same engine, it may be
        further on than the round it is given for.
        """
        request = self._builder.single(
            prompt, sampling, add_special_tokens, request_number, speculation=speculation
        )
        return self._hinted(self._dispatcher.rounds_of(request, lambda row: row))

    def with_method(
        self,
        method: Method,
        options: Mapping[str, object] | None = None,
        *,
        num_speculative_tokens: int | Literal["auto", "auto-repeatable", "fixed"] | None = None,
    ) -> Engine:
        """An engine of another method on the same models, with this one's other settings. Each of
        the two engines may take ``max_memory`` and ``prefix_cache``. Both run by the models'
        compiled programs. If this engine was loaded with programs, the other one compiles none: its
        head and its verification rules run by those that are in the cache folder, or eagerly.

        Args:
            method: a method that needs nothing else than the models, or the head, of this engine.
            options: the method's own parameters by name.
            num_speculative_tokens: γ, or ``auto``; None takes the drafter's own depth if it has
                one, else 5.

        Raises:
            InvalidParameterError: an option that the method does not have.
            IncompatibleError: a method that needs a draft model or head which is not there.
        """
        target, draft = self._models
        if draft is not None and not (method.needs_draft or method.needs_head):
            draft = None
        settings, stops = self._settings, method.stops_when_unsure
        engine = Engine(
            target,
            draft,
            method,
            num_speculative_tokens=num_speculative_tokens,
            draft_confidence=settings.draft_confidence if stops else 0.0,
            draft_length=settings.draft_length if stops else "fixed",
            max_batch_size=settings.max_batch_size,
            max_memory=None if settings.memory_budget is None else settings.memory_budget.num_bytes,
            prefix_cache=settings.prefix_bytes,
            kv_dtype=settings.kv_dtype,
            options=options,
            measure=settings.measure,
            generation_config=settings.generation_config,
        )
        engine._share_programs_of(self)
        return engine

    @property
    def compiler(self) -> BackgroundCompiler | None:
        """What compiles missing programs of the models in the background; None once they are all
        taken over."""
        return self._programs.compiler

    @compiler.setter
    def compiler(self, compiler: BackgroundCompiler | None) -> None:
        self._programs.compiler = compiler

    @property
    def late_kernels(self) -> LateKernels | None:
        """What gives the models their kernels once these are compiled; None where they had them at
        once."""
        return self._programs.late_kernels

    @late_kernels.setter
    def late_kernels(self, late: LateKernels) -> None:
        self._programs.late_kernels = late

    @property
    def length_policy(self) -> LengthPolicy | None:
        """How a governor chooses draft lengths, as ``num_speculative_tokens`` says it; None without
        one."""
        if self.governor is None:
            return None
        return AUTO if self._settings.governs_seeds else AUTO_REPEATABLE

    @property
    def kv_bytes(self) -> tuple[int, int] | None:
        """Bytes that KV buffers and kept prefixes take now, and ``max_memory``; None without a
        bound, where nobody counts them."""
        budget = self._settings.memory_budget
        return None if budget is None else (budget.held(), budget.num_bytes)

    def new_scheduler(self) -> Scheduler:
        """A scheduler of its own, beside the one that all calls of this engine share: for a server
        or a test that runs its steps itself."""
        scheduler = Scheduler(
            self._builder.row,
            self._kind_of,
            self._new_batch,
            self.max_batch_size,
            self._memory,
            self.prefixes,
            self._around_step,
            lambda: self._programs.wait_for_idle,
        )
        self._programs.add(scheduler)
        return scheduler

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        """Takes over programs before a step, and leaves processors to other processes in it."""
        with self._sharing_processors():
            self._take_over_programs()
            yield

    def _sharing_processors(self) -> AbstractContextManager[None]:
        compiler = self._programs.compiler
        num_compiling = 0 if compiler is None else compiler.num_running
        if not num_compiling and not self._ignores_threads:
            return nullcontext()
        return sharing_processors(num_compiling, looks=self._ignores_threads)

    @cached_property
    def _ignores_threads(self) -> bool:
        """Whether outputs do not depend on how many threads compute: our kernels compute all matrix
        products of the models, and no head drafts without a model."""
        models = self.drafter.capabilities.models
        by_models = bool(models) or not self.method.needs_head
        return by_models and all(ignores_threads(m.module) for m in (self.target, *models))

    def _take_over_programs(self) -> None:
        """Loads programs that were compiled in the background, between two rounds. What a governor
        has measured without them is forgotten."""
        if self._programs.compiler is not None:
            self._programs.take_over()
        if self._num_changes != self._programs.num_changes:
            self._num_changes = self._programs.num_changes
            vars(self).pop("_ignores_threads", None)  # the models may have got kernels
            if self.governor is not None:
                self.governor.forget_times()

    def _share_programs_of(self, other: Engine) -> None:
        """Runs by the programs of another engine on the same models. Where that one compiles none
        any more, neither does this one: of the programs of its heads and rules it loads those that
        are in the cache folder."""
        from outrider.engine.warming import load_own

        other._programs.add(*self._programs.schedulers)
        self._programs, self._num_changes = other._programs, other._programs.num_changes
        if (late := self._programs.late_kernels) is not None:
            late.add_heads(self)  # this engine has heads of its own
        if other.verification is not None and other.verification.sealed:
            load_own(self)

    def request(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
        request_number: int | None = None,
        num_speculative_tokens: int | None = None,
        prediction: str | Sequence[int] | None = None,
        speculation: Speculation | None = None,
    ) -> Request:
        """A checked request for :meth:`Scheduler.add`. Arguments and errors as those of
        :meth:`generate`, and:

        Args:
            num_speculative_tokens: most tokens drafted per round for this request, from 0, which
                drafts nothing, to the engine's γ; None takes the engine's.
            prediction: the output that is expected, as text or token ids. The method
                ``outrider.methods.copying.PREDICTED`` copies it; other methods do not read it.
        """
        request = self._builder.single(
            prompt, sampling, add_special_tokens, request_number, speculation=speculation
        )
        return self._builder.guided(request, num_speculative_tokens, prediction)

    def prompt_logprobs(self, prompt: Prompt, num_top: int = 0) -> PromptLogprobs:
        """The log-probabilities of a prompt's own tokens, by a pass of the target apart from any
        batch. Not to be called while another thread runs a step.

        Args:
            prompt: as for :meth:`stream`.
            num_top: how many of the most probable tokens to name at each position.

        Raises:
            PromptError: as :meth:`encode`; an encoder-decoder, whose prompt has no probability.
            NonFiniteLogitsError: the target produced NaN or infinite logits.
        """
        if self.target.decoder_prompt is not None:
            raise PromptError(
                f"{self.target.name} is an encoder-decoder, which gives its prompt no probability: "
                f"leave out the log-probabilities of the prompt"
            )
        return prompt_logprobs(self.target, self.encode(prompt), num_top)

    def adapt(
        self, folder: str | Path | None = None, settings: AdaptSettings | None = None
    ) -> Adaptation:
        """Adapts the draft model or EAGLE-3 head to what the engine generates, until the handle is
        stopped.

        Arguments and errors as those of :func:`outrider.train.online.adapt`.
        """
        from outrider.train.online import adapt

        return adapt(self, folder, settings)

    def adopt_draft(self, draft: HFModel | Head) -> None:
        """Drafts with another copy of the draft model or head from now on, as do the engines that
        :meth:`with_method` makes of this one; each of them has a copy of its own of a head. Rows
        that are running keep the one that they have."""
        target, _ = self._models
        self._models = target, draft
        self.draft = draft if isinstance(draft, HFModel) else None
        self.drafter = self.new_drafter()

    def new_drafter(self) -> Drafter[Any]:
        """Another drafter like the engine's, which shares its models and has learned nothing."""
        _, draft = self._models
        head = draft if isinstance(draft, Head) else None
        return drafter_of(self.target, self.draft, self._settings, head)

    def row(self, request: Request) -> Row:
        """The row of a request, for a running batch apart from those of the engine."""
        return self._builder.row(request)

    def settled(self, sampling: Sampling) -> Sampling:
        """The parameters that a request with these has: those that are None are filled in from the
        generation config, or by default."""
        return self._builder.settled(sampling)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A prompt's token ids, checked.

        Raises:
            PromptError: what is no prompt, an empty one, one longer than the context, or ids out of
                range.
        """
        return self._builder.encode(read_prompt(prompt), add_special_tokens)

    def _hinted(self, rounds: Iterator[tuple[Row, T]]) -> Iterator[T]:
        """What was made of a row's rounds; warns about what the user may have overlooked."""
        for row, item in rounds:
            if self._hint is not None:
                self._hint(row)
            yield item

    def _kind_of(self, request: Request) -> BatchKind:
        sampled = self.recipe.greedy_apart and not request.sampling.greedy
        return BatchKind(request.sampling.in_order, sampled)

    def _new_batch(self, kind: BatchKind) -> RunningBatch:
        return RunningBatch(*self._batch_parts(kind))

    def _batch_parts(self, kind: BatchKind) -> tuple[Any, ...]:
        """The arguments of a running batch."""
        recipe = METHODS["plain"].recipe() if kind.in_order else self.recipe
        return (
            self.target,
            NoDraft() if kind.in_order else self.drafter,
            partial(_verifier, recipe),
            self.num_speculative_tokens,
            self.measure,
            self._memory,
            self.verification,
            self.observed,
            None if kind.in_order or self.governor is None else self._governor_of_batch(),
        )

    def _governor_of_batch(self) -> BatchGovernor:
        """The choices for a new running batch."""
        assert self.governor is not None
        return BatchGovernor(self.governor)


def _verifier(recipe: Recipe, greedy: bool) -> Verifier:
    return recipe.greedy_verifier if greedy else recipe.verifier
