"""The governor: chooses draft lengths by what it measures while the engine runs.

An engine has one ``Governor`` (``governor.py``), which learns times (``costs.py``) and acceptance
(``acceptance.py``) from the outcomes of rounds (``outcomes.py``). Each of its running batches has a
``BatchGovernor`` (``batch_governor.py``), which chooses among what the sources offer
(``sources.py``) the option of most goodput (``allocation.py``), and now and then probes another one
(``probes.py``).

A length is chosen before the round from what earlier rounds showed. It does not depend on the
round's drafted tokens or random numbers, so every lossless rule stays lossless
(``docs/decisions/0031-lengths-chosen-by-measured-times.md``). It does depend on the clock.
"""
