"""The program that torchrun starts once a rank: an engine's place, with a rank agent beside it.

Usage: ``torchrun … --module rankgate.coordinator.cli.demo.rank FOLDER``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch

from rankgate.agents.agent import Pair, RankAgent
from rankgate.agents.describe import KvCache, RankDescription
from rankgate.agents.errors import AgentError, NotReadyError
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.destination import Destination
from rankgate.coordinator.cli.demo.job import (
    DECODE,
    GROUP,
    PREFILL,
    Counts,
    Folder,
    Job,
    Journal,
    Result,
)
from rankgate.coordinator.cli.demo.launch import end_with_parent
from rankgate.coordinator.cli.demo.source import Source
from rankgate.proto.descriptor import Coordinates, Layout, Model, Software, StateComponent
from rankgate.proto.findings import Finding
from rankgate.proto.geometry import heads_of_rank

IDLE_SECONDS = 0.02


def main() -> None:
    """Play one rank to the end of the run."""
    folder = Folder(Path(sys.argv[1]))
    world, rank = os.environ["TORCHELASTIC_RUN_ID"], int(os.environ["RANK"])
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    journal = Journal(folder.journal(world, rank))
    journal.write("started", pid=os.getpid())
    try:
        folder.write_result(RankRun(folder, journal, world, rank).play())
    except Exception as error:
        journal.write("error", text=f"{type(error).__name__}: {error}")
        raise
    finally:
        journal.close()


class RankRun:
    """One rank's part of the run."""
