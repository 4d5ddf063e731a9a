"""Registers the model type ``outrider`` with lm-evaluation-harness.

From Python, import this module and evaluate:

    import lm_eval
    import outrider.lab.quality.lm_eval_model
    lm_eval.simple_evaluate(
        model="outrider", model_args="target=big/,draft=small/,method=mentored", tasks=["gsm8k"]
    )

From a shell, this module is ``lm_eval`` itself with the type registered:

    python -m outrider.lab.quality.lm_eval_model --model outrider --model_args target=big/ ...

``model_args`` are the arguments of ``outrider.load``. Needs the extra ``lmeval``.
"""

from typing import Any

from outrider.engine import Engine, load
from outrider.lab.quality.errors import MissingMetricPackageError
from outrider.lab.quality.harness import HarnessModel
from outrider.lab.quality.logprobs import BATCH

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingMetricPackageError(
        'lm-evaluation-harness is not installed: pip install "outrider[lmeval]"'
    ) from error


@register_model("outrider")
class OutriderLM(TemplateLM):
    """An Outrider engine as a model of lm-evaluation-harness.

    Args:
        engine: the engine; None loads one.
        batch_size: most rows of a forward pass, and of a generation.
        settings: arguments of ``outrider.load``, such as target, draft and method.

    Raises:
        InvalidParameterError: a batch size such as ``auto``.
        OutriderError: see ``outrider.load``.
    """

    def __init__(
        self, engine: Engine | None = None, batch_size: int | str = BATCH, **settings: Any
    ) -> None:
        super().__init__()
        rows = int(batch_size) if str(batch_size).isdecimal() else BATCH
        if engine is None:
            engine = load(**{"max_batch_size": rows, "num_speculative_tokens": "fixed", **settings})
        self.model = HarnessModel(engine, rows)
        self.tokenizer = self.model.tokenizer
        self.backend = "seq2seq" if self.model.is_encoder_decoder else "causal"

    @property
    def eot_token_id(self) -> int:
        return self.model.end_token

    @property
    def prefix_token_id(self) -> int:
        return self.model.first_token

    @property
    def max_length(self) -> int:
        return self.model.limit

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.model.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        with _bar(len(pairs), "log-likelihoods", disable_tqdm) as show:
            answers = self.model.score(pairs, show)
        for (key, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        with _bar(None, "windows", disable_tqdm) as show:
            answers = self.model.score_texts(texts, show)
        for text, answer in zip(texts, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answer)
        return answers

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers: list[str] = []
        with _bar(len(requests), "generations", disable_tqdm) as show:
            for first in range(0, len(requests), self.model.batch_size):
                asked = [
                    request.args for request in requests[first : first + self.model.batch_size]
                ]
                texts = self.model.generate(asked)
                for arguments, text in zip(asked, texts, strict=True):
                    self.cache_hook.add_partial("generate_until", arguments, text)
                answers += texts
                show(len(answers))
        return answers


class _bar:
    """A progress bar of tqdm, as the harness shows for its own models."""

    def __init__(self, total: int | None, what: str, hidden: bool) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, desc=what, disable=hidden)

    def __enter__(self) -> Any:
        return lambda done: self._bar.update(done - self._bar.n)

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
