"""A target that is sharded among processes (tensor parallelism).

Every process calls :func:`run`, as ``torchrun script.py`` starts them::

    from outrider.cluster import sharded

    def main(engine):                                  # runs on rank 0
        print(engine.generate("Once upon a time").text)

    if __name__ == "__main__":
        sharded.run(main, "big/", "small/")

Rank 0 takes requests and decides; the other ranks run the same rounds (``lockstep.py``).
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.cluster.sharded.entry import run
    from outrider.cluster.sharded.loading import PLACEMENTS, Placement, load
    from outrider.cluster.sharded.lockstep import Follower
    from outrider.cluster.sharded.ranks import Ranks, joined

__all__ = ["PLACEMENTS", "Follower", "Placement", "Ranks", "joined", "load", "run"]

_HOMES = {
    "entry": ["run"],
    "loading": ["PLACEMENTS", "Placement", "load"],
    "lockstep": ["Follower"],
    "ranks": ["Ranks", "joined"],
}
__getattr__, __dir__ = lazy(
    __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
)
