"""Tuning: which draft, which method, how many tokens, and is it worth it at this batch size?

machine, engine_machine   what is measured with: an interface, and real models behind it
sources                   the candidates
acceptance, costs         what is measured of each: acceptance by position, times of rounds
predict, estimator        tokens per second of configurations that were not run
time_budget, halving      real runs of the best ones, within the time that there is
tuner, tuning             all of it, and what was measured
answer                    what to use, in words and as numbers
configuration             ``outrider.toml``
export                    the same for other engines
plot                      the answer as a figure
"""
