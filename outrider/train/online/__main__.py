"""The process of a learner; :class:`outrider.train.online.process.ProcessWorker` starts it."""

from outrider.train.online.process import run_learner

if __name__ == "__main__":
    run_learner()
