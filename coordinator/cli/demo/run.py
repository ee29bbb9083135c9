"""One run of the demo from the first process to the last, with a bound on every wait."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from rankgate.coordinator.cli.client import DaemonUnreachableError, OperatorClient, OperatorError
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.faults import Evidence
from rankgate.coordinator.cli.demo.job import DECODE, PREFILL, Folder, Job
from rankgate.coordinator.cli.demo.launch import Program, Programs, python, torchrun
from rankgate.coordinator.cli.demo.progress import Show
from rankgate.coordinator.cli.demo.report import make_report
from rankgate.coordinator.cli.demo.watch import Watch
from rankgate.proto.views import StatusView, View

STEP_SECONDS: Final = 0.1
"""How often journals and views are looked at."""

FORM_GRACE_SECONDS: Final = 3
"""How long the demo's daemon waits for a world's ranks before it reports them missing."""

RANKS_MODULE: Final = "rankgate.coordinator.cli.demo.rank"


class DemoError(Exception):
    """The demo could not be run to its end; the text says where it stood and what to look at."""


@contextmanager
def run_folder(*, keep: bool) -> Iterator[Path]:
    """Make a folder for one run; it goes when the run ends, unless it is to be kept."""
    root = Path(tempfile.mkdtemp(prefix="rankgate-demo-"))
    try:
        yield root
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


class Run:
    """The processes of one run and what is known of them."""

    def __init__(self, folder: Folder, job: Job, programs: Programs, show: Show) -> None:
        """Write the job down; nothing is started yet."""
        self.job = job
        self._folder = folder
        self._programs = programs
        self._show = show
        self._operator = f"ipc://{folder.root}/operator.sock"
        self._watch = Watch(folder, job)
        self._running: dict[str, Program] = {}
        self._status: StatusView | None = None
        self._status_seen_at: float | None = None
        self._killed_at: float | None = None
        self._seconds: dict[str, float] = {}
        folder.prepare(job)

    def execute(self) -> dict[str, Any]:
        """Run to the end and return the report.

        Raises:
            DemoError: a process ended early, or the time ran out.
        """
        began = time.monotonic()
        self._start_daemon()
        with OperatorClient(self._operator) as client:
            self._await_daemon(client)
            self._seconds["daemon"] = time.monotonic() - began
            self._start_worlds()
            self._follow(client)
            pairs = self._ask(client, "pairs").pairs or []
            self._status = self._ask(client, "status").status
            self._phases(began)
            self._leave()
        self._seconds["total"] = time.monotonic() - began
        self._watch.read()
        return make_report(self._evidence(), pairs, self._seconds)

    # --- starting -----------------------------------------------------------------------------

    def _start_daemon(self) -> None:
        state = self._folder.root / "state"
        state.mkdir()
        command = python(
            "rankgate.coordinator.cli",
            "serve",
            "--listen",
            self.job.daemon,
            "--operator",
            self._operator,
            "--state-dir",
            str(state),
            "--form-grace",
            str(FORM_GRACE_SECONDS),
        )
        self._start("daemon", command, {})

    def _start_worlds(self) -> None:
        # One thread a rank: many ranks share this machine's cores. What torchrun and the agents
        # leave in the temporary folder goes with the run's folder.
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder.root / "tmp")}
        for world in (PREFILL, DECODE):
            restarts = int(self.job.fault == faults.DEAD_RANK and world == PREFILL)
            command = torchrun(
                world, self.job.tp(world), restarts, RANKS_MODULE, str(self._folder.root)
            )
            self._start(world, command, env)
            self._show.say(f"started {world}: torchrun with {self.job.tp(world)} ranks")

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self._running[name] = self._programs.start(name, command, self._folder.log(name), env)

    def _await_daemon(self, client: OperatorClient) -> None:
        while True:
            self._check()
            try:
                self._status = client.ask("status", timeout=1.0).status
            except DaemonUnreachableError:
                time.sleep(STEP_SECONDS)
            else:
                self._show.say(f"daemon answers at {self._operator}")
                return

    # --- following ----------------------------------------------------------------------------

    def _follow(self, client: OperatorClient) -> None:
        """Watch until the run has come to what it is for, or cannot any more."""
        goal = self._goal()
        while True:
            self._status = self._ask(client, "status").status
            self._watch.read()
            self._note_refusal()
            self._show.update(self.job, self._watch, self._status)
            if goal():
                return
            self._check()
            if self.job.fault == faults.DEAD_RANK:
                self._kill_when_under_way()
            time.sleep(STEP_SECONDS)

    def _ask(self, client: OperatorClient, view: str) -> View:
        try:
            return client.ask(view)
        except OperatorError as error:
            self._check()
            raise DemoError(self._where(str(error))) from error

    def _goal(self) -> Callable[[], bool]:
        if self.job.fault in {"", faults.DEAD_RANK}:
            return self._stream_settled
        return self._refusal_settled

    def _stream_settled(self) -> bool:
        """Whether all requests are through, or no rank is left to take part."""
        watch = self._watch
        refused = all(notes.refused_at is not None for notes in watch.ranks)
        return refused or (watch.decode_complete and watch.staged == 0)

    def _refusal_settled(self) -> bool:
        """Whether everyone has seen the refusal, or it is too late for that."""
        told = all(faults.told(self.job, notes) for notes in self._watch.ranks)
        if told and self._status_seen_at is not None:
            return True
        began = [n.registered_at for n in self._watch.ranks if n.registered_at is not None]
        expected = sum(faults.registers(self.job, n.world, n.rank) for n in self._watch.ranks)
        late = bool(began) and time.monotonic() > max(began) + 2 * faults.LIMIT_SECONDS
        return len(began) == expected and late

    def _note_refusal(self) -> None:
        if self.job.fault in {"", faults.DEAD_RANK} or self._status is None:
            return
        found = faults.refusal_in(faults.status_findings(self._status), self.job)
        if found is not None and self._status_seen_at is None:
            self._status_seen_at = time.monotonic()
            self._show.say(f"status shows {found.code} {found.slug}: {found.message}")

    def _kill_when_under_way(self) -> None:
        """Kill -9 a prefill rank once some requests have been delivered and more are staged."""
        if self._killed_at is not None or self._watch.delivered < max(1, self.job.requests // 4):
            return
        victim = self._watch.of(PREFILL)[-1]
        self._killed_at = time.monotonic()
        self._running[PREFILL].kill_descendant(victim.pid)
        self._show.say(f"killed prefill rank {victim.rank} after {self._watch.delivered} requests")

    def _check(self) -> None:
        """Raise when a program has ended, a rank has failed, or the time is up."""
        if self._watch.error:
            raise DemoError(self._where(self._watch.error))
        for name, program in self._running.items():
            if program.exit_code is not None:
                raise self._ended_badly(name, program)
        if time.monotonic() > self.job.deadline:
            raise DemoError(self._where("the time is up; see --timeout"))

    def _ended_badly(self, name: str, program: Program) -> DemoError:
        self._watch.read()
        text = f"{name} ended with exit code {program.exit_code}"
        return DemoError(self._where(f"{text}: {self._watch.error}\n{program.tail()}"))

    def _where(self, text: str) -> str:
        notes = ", ".join(
            f"{n.world} {n.rank}: {len(n.delivered)} delivered, {n.staged} staged"
            for n in self._watch.ranks
        )
        return f"{text}\n{notes}\n--keep keeps the logs of a run"

    # --- ending -------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Let the ranks go and wait for both torchruns to end well."""
        began = time.monotonic()
        self._folder.finish()
        for world in (PREFILL, DECODE):
            program = self._running[world]
            if not program.wait(self.job.deadline):
                raise DemoError(self._where(f"{world} does not end"))
            if program.exit_code:
                raise self._ended_badly(world, program)
        self._running["daemon"].signal(signal.SIGTERM)
        self._seconds["leave"] = time.monotonic() - began

    def _phases(self, began: float) -> None:
        ranks = self._watch.ranks
        registered = [n.first_registered_at for n in ranks if n.first_registered_at is not None]
        linked = [n.first_linked_at for n in ranks if n.first_linked_at is not None]
        if registered:
            self._seconds["start"] = max(registered) - began - self._seconds["daemon"]
        if registered and linked:
            self._seconds["pair"] = max(0.0, max(linked) - max(registered))
            self._seconds["transfer"] = time.monotonic() - max(linked)

    def _evidence(self) -> Evidence:
        if self._status is None:
            raise DemoError("the daemon never showed its status")
        results = self._folder.results()
        return Evidence(self.job, self._watch, results, self._status, self._status_seen_at)


def run_demo(job: Job, *, keep: bool, show: Show) -> tuple[Job, dict[str, Any]]:
    """Run the demo in a fresh folder.

    Args:
        job: what to run; its daemon endpoint is filled in here.
        keep: leave the folder with journals and logs, and say where it is.
        show: the running commentary.
    """
    with run_folder(keep=keep) as root:
        if keep:
            show.say(f"work directory: {root}")
        here = msgspec.structs.replace(job, daemon=f"ipc://{root}/agents.sock")
        with Programs() as programs:
            return here, Run(Folder(root), here, programs, show).execute()
