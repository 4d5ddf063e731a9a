"""Quality: what methods do to the outputs, measured, compared, and run by others' harnesses.

logprobs, perplexity  outputs under the target
rouge, translation    against references: ROUGE; BLEU and chrF
exact_match           final answers: GSM8K, short answers
pass_at_k             programs that pass their tests, run in ``outrider.lab.sandbox``
distinct              repetition
bootstrap             paired differences between two methods
metrics               all of these, registered for ``outrider bench``
harness, lm_eval_model  an engine as a model of lm-evaluation-harness
"""

from outrider.imports.lazy import lazy

_HOME = {
    "Difference": "outrider.lab.quality.bootstrap",
    "HarnessModel": "outrider.lab.quality.harness",
    "Perplexity": "outrider.lab.quality.perplexity",
    "continuation_logprobs": "outrider.lab.quality.logprobs",
    "output_perplexity": "outrider.lab.quality.perplexity",
    "paired_bootstrap": "outrider.lab.quality.bootstrap",
}
__getattr__, __dir__ = lazy(__name__, _HOME)
