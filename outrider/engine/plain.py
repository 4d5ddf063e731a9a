"""Plain decoding with another engine's target, to compare that engine with."""

from outrider.engine.engine import Engine
from outrider.engine.warming import Report, warm_up
from outrider.methods import METHODS


def plain_engine(engine: Engine, report: Report | None = None) -> Engine:
    """An engine for one row that decodes plainly with the same target. If that one is compiled, so
    is this one, since an eager verification rule would take longer: programs that are missing are
    compiled now.

    Args:
        engine: the engine to compare with.
        report: called before each program, as by :func:`outrider.engine.warming.warm_up`.
    """
    plain = Engine(
        engine.target,
        None,
        METHODS["plain"],
        num_speculative_tokens=1,
        max_batch_size=1,
        generation_config=engine.generation_config,
    )
    if engine.target.compiled is not None:
        warm_up(plain, report)
    return plain
