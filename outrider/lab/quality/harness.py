"""An engine as lm-evaluation-harness uses a model: log-probabilities of texts, and generation.

Log-probabilities are the target's own (``logprobs.py``), by forward passes over many tokens: what
drafts does not enter them. Generation runs the engine's method, so tasks that generate show what a
lossy method costs. The class needs no lm_eval; ``lm_eval_model.py`` registers it there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outrider.core.errors import InvalidParameterError, PromptError
from outrider.core.values import shown
from outrider.engine import Engine
from outrider.lab.quality.logprobs import BATCH, continuation_logprobs
from outrider.sampling import Sampling

MOST_NEW_TOKENS = 256
"""What lm-evaluation-harness generates where a task does not say."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
Progress = Callable[[int], None]


class HarnessModel:
    """An engine in the terms of the harness.

    Args:
        engine: generates; its target scores.
        batch_size: most rows of a forward pass that scores.

    Raises:
        InvalidParameterError: the target has no tokenizer, or no token to begin a text with.
    """

    def __init__(self, engine: Engine, batch_size: int = BATCH) -> None:
        if engine.target.tokenizer is None:
            raise InvalidParameterError(
                f"{engine.target.name} has no tokenizer: load the model from a folder that has one"
            )
        self.engine = engine
        self.batch_size = batch_size
        self.tokenizer: Any = engine.target.tokenizer
        self.limit = engine.target.limit
        self.is_encoder_decoder = engine.target.decoder_prompt is not None

    @property
    def end_token(self) -> int:
        """The end-of-sequence token."""
        return self._token("eos_token_id", self.tokenizer.eos_token_id)

    @property
    def first_token(self) -> int:
        """What an empty context is: the beginning-of-sequence token, or the end-of-sequence token
        where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.end_token if bos is None else int(bos)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids. A text that begins with the beginning-of-sequence token gets no second one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and text.startswith(bos))
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        progress: Progress = lambda done: None,
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one.

        A context that is too long loses its first tokens.

        Args:
            pairs: token ids of a context, and of its continuation.
            progress: called with the number of pairs that are done.

        Raises:
            PromptError: a continuation longer than the target's context.
        """
        cut = [(self._cut(context, continuation), continuation) for context, continuation in pairs]
        scored = continuation_logprobs(
            self.engine.target, cut, batch_size=self.batch_size, progress=progress
        )
        return [(each.total, each.greedy) for each in scored]

    def score_texts(
        self, texts: Sequence[str], progress: Progress = lambda done: None
    ) -> list[float]:
        """The log-probability of each whole text, of any length.

        A long text is read in windows of the target's context, each token predicted once. The last
        window is a full one, so its tokens have as many before them as there is room for.

        Args:
            texts: of any length; an empty one has log-probability 0.
            progress: called with the number of windows that are done.

        Raises:
            InvalidParameterError: the target is an encoder-decoder.
        """
        if self.is_encoder_decoder:
            raise InvalidParameterError(
                f"{self.engine.target.name} is an encoder-decoder, which gives a text no "
                "probability without a source: choose tasks without rolling log-likelihoods"
            )
        owners, pairs = [], []
        for owner, text in enumerate(texts):
            for pair in windows(self.encode(text), self.first_token, self.limit):
                owners.append(owner)
                pairs.append(pair)
        totals = [0.0] * len(texts)
        for owner, (total, _) in zip(owners, self.score(pairs, progress), strict=True):
            totals[owner] += total
        return totals

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continues contexts by the engine's method.

        A context that leaves no room for the new tokens loses its first ones.

        Args:
            requests: a context, and the settings of its generation: ``until``, ``max_gen_toks`` or
                one of its other names, ``do_sample``, and sampling parameters. Without
                ``do_sample`` or a temperature, generation is greedy.

        Raises:
            InvalidParameterError: a setting that Outrider does not have.
            PromptError: as many new tokens as the context has.
        """
        prompts, samplings = [], []
        for context, settings in requests:
            sampling = sampling_of(settings)
            room = self.limit if self.is_encoder_decoder else self.limit - sampling.max_new_tokens
            if room < 1:
                raise PromptError(
                    f"{sampling.max_new_tokens} new tokens leave no room for a prompt in the "
                    f"context of {self.limit}: set max_gen_toks lower"
                )
            prompts.append((self.encode(context) or [self.first_token])[-room:])
            samplings.append(sampling)
        return [result.text for result in self.engine.generate(prompts, samplings)]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Sequence[int]:
        if self.is_encoder_decoder:
            return context[-self.engine.target.prompt_limit :]
        room = self.limit + 1 - len(continuation)
        if room < 1:
            raise PromptError(
                f"a continuation of {len(continuation)} tokens does not fit into the context of "
                f"{self.limit}: score it as a whole text, in windows"
            )
        return context[-room:]

    def _token(self, name: str, token: int | None) -> int:
        if token is None:
            raise InvalidParameterError(
                f"the tokenizer of {self.engine.target.name} has no {name}: set one in its "
                "tokenizer_config.json"
            )
        return int(token)


def windows(
    tokens: Sequence[int], first: int, length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Windows over a text: context and continuation, together at most ``length`` + 1 tokens.

    Args:
        tokens: of the text.
        first: the token before the first one.
        length: tokens that a forward pass can read.
    """
    known = [first, *tokens]
    done = 0
    while done < len(tokens):
        end = min(done + length, len(tokens))
        begin = max(0, end - length) if done else 0
        yield known[begin : done + 1], list(tokens[done:end])
        done = end


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """The sampling parameters of a generation's settings.

    Raises:
        InvalidParameterError: a setting that Outrider does not have.
    """
    left = dict(settings)
    lengths = [left.pop(name) for name in _LENGTHS if name in left]
    until = left.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    samples = left.pop("do_sample", None)
    given = {name: left.pop(name) for name in _SAMPLING if left.get(name) is not None}
    unknown = {name: value for name, value in left.items() if value is not None}
    if unknown:
        name, value = next(iter(unknown.items()))
        raise InvalidParameterError(
            f"generation setting {name}={shown(value)}: Outrider reads until, do_sample, "
            f"{', '.join((*_LENGTHS, *_SAMPLING))}; remove it from the task's generation_kwargs"
        )
    if samples is False or (samples is None and "temperature" not in given):
        given["temperature"] = 0.0
    return Sampling(
        max_new_tokens=int(next((n for n in lengths if n is not None), MOST_NEW_TOKENS)),
        stop=[stop for stop in stops if stop],
        **given,
    )
