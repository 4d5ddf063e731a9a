"""A target that is sharded among processes (tensor parallelism).

Every process calls :func:`run`, as ``torchrun script.py`` starts them::

    from outrider.cluster import sharded

    def main(engine):                                  # runs on rank 0
        print(engine.generate("Once upon a time").text)

    if __name__ == "__main__":
        sharded.run(main, "big/", "small/")

Rank 0 takes requests and decides; the other ranks run the same rounds (``lockstep.py``).
"""

from outrider.cluster.sharded.loading import PLACEMENTS, Placement, load
from outrider.cluster.sharded.lockstep import Follower
from outrider.cluster.sharded.ranks import Ranks, joined
from outrider.cluster.sharded.run import run

__all__ = ["PLACEMENTS", "Follower", "Placement", "Ranks", "joined", "load", "run"]
