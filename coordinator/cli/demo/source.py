"""The prefill side of the stream: fill pages, stage them, take them back when they are released."""

from __future__ import annotations

import time
from typing import Final

from rankgate.agents.agent import Broken, RankAgent, Released, Wanted
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.job import Folder, Job, Journal, Result
from rankgate.coordinator.cli.demo.pool import PagePool

IDLE_SECONDS: Final = 0.002


class Source:
    """One prefill rank.

    In its first life it stages the requests in their order, ``concurrency`` at a time. A
    restarted one does not know what has been delivered: it stages what is wanted of it.
    """

    def __init__(
        self, agent: RankAgent, job: Job, folder: Folder, journal: Journal, result: Result
    ) -> None:
        """Begin with nothing staged."""
        self._agent = agent
        self._job = job
        self._folder = folder
        self._journal = journal
        self._result = result
