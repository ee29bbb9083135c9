"""The daemon process: wires core, sockets, store and timers on one uvloop loop."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import uvloop
from msgspec import Struct

from rankgate.coordinator.core.events import (
    ClockTicked,
    MessageArrived,
    MessageRefused,
    PeerDisconnected,
    QueryArrived,
)
from rankgate.coordinator.core.machine import Coordinator
from rankgate.coordinator.core.settings import Settings
from rankgate.coordinator.runtime.clock import boot_id, boottime_ms
from rankgate.coordinator.runtime.executor import Executor
from rankgate.coordinator.runtime.notify import Notifier
from rankgate.coordinator.runtime.router import Router, answerable
from rankgate.coordinator.runtime.sockets import bind, ipc_path, make_context, make_router
from rankgate.coordinator.runtime.store import Store
from rankgate.proto import __version__
from rankgate.proto.codec import WireError, decode, encode
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import Query
from rankgate.proto.views import View

_STOP_SECONDS = 1.5


class DaemonConfig(Struct, frozen=True, kw_only=True):
    """What the process needs besides the core's rules; checked by the command line's loader."""

    listen: Sequence[str]
    operator: str
    state_dir: Path
    insecure: bool
    max_ranks: int
    settings: Settings


class Daemon:
    """One serving process.

    Invariant: READY only after everything is bound; the watchdog is fed by the serving loop
    alone, after it has polled its sockets; whatever breaks the loop ends the process, loudly.
    """

    def __init__(self, config: DaemonConfig) -> None:
        """Open the store and bind the sockets.

        Raises:
            StartError: with what is in the way.
        """
        self._config = config
        self._heartbeat = config.settings.heartbeat / 1000
        self._log = structlog.get_logger()
        self._notifier = Notifier()
        self._exit = 0
        _raise_descriptor_limit(config.max_ranks, self._log)
        self._store = Store(config.state_dir, boot_id())
        self._context = make_context()
        self._agents_socket = make_router(self._context)
        self._operator_socket = make_router(self._context)
        try:
            self._endpoints = [bind(self._agents_socket, one) for one in config.listen]
            self._operator_endpoint = bind(self._operator_socket, config.operator)
        except BaseException:
            self._context.destroy(0)
            self._store.close()
            raise
        self._core = Coordinator(
            self._store.identity,
            config.settings,
            self._store.durable,
            boottime_ms(),
            endpoints=self._endpoints,
            insecure=config.insecure,
        )
        self.on_stop: Callable[[int], None] = lambda _code: None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._fed = 0.0
        self._swept = 0.0

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._stopping = asyncio.Event()
        loop.set_exception_handler(self._unhandled)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        pool = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._executor = Executor(
            loop,
            self._core,
            self._store,
            pool,
            on_fatal=self._fail,
            late_after=self._config.settings.heartbeat,
        )
        self._agents = Router(
            loop, self._agents_socket, on_message=self._message, on_gone=self._gone
        )
        self._operators = Router(
            loop, self._operator_socket, on_message=self._query, on_gone=lambda *_: None
        )
        self._executor.serve(self._agents, self._operators)
        self._executor.after_step = self._rearm
        self._tick()
        self._log.info(
            "daemon_ready",
            version=__version__,
            endpoints=self._endpoints,
            operator=self._operator_endpoint,
            instance=self._store.identity.instance.hex()[:8],
            start=self._store.identity.start,
            insecure=self._config.insecure,
        )
        self._notifier.ready()
        await self._stopping.wait()
        self._close(pool)
        return self._exit

    # --- what arrives ---------------------------------------------------------------------

    def _message(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            header, message = decode(frames)
        except WireError as error:
            if answerable(frames) is not None:
                self._agents.send(peer, encode(error.answer, error.id))
            self._executor.step(MessageRefused(peer, error.code.id, error.text))
            return
        self._executor.step(MessageArrived(peer, header.id, message))

    def _gone(self, peer: bytes, reason: str) -> None:
        self._executor.step(PeerDisconnected(peer, reason))

    def _query(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            header, message = decode(frames)
        except WireError as error:
            if answerable(frames) is not None:
                self._operators.send(peer, encode(error.answer, error.id))
            return
        if isinstance(message, Query):
            self._executor.step(QueryArrived(peer, header.id, message))
            return
        side = Side("this socket", "operators' queries only")
        if answerable(frames) is not None:
            view = View(finding=finding(Code.KIND_UNKNOWN, "kind", side))
            self._operators.send(peer, encode(view, header.id))

    # --- time -----------------------------------------------------------------------------

    def _tick(self) -> None:
        """Read the sockets empty, then let the core look at its deadlines."""
        self._timer = None
        self._agents.drain()
        self._operators.drain()
        self._executor.step(ClockTicked())
        now = time.monotonic()
        if now - self._swept >= self._heartbeat:
            self._swept = now
            self._agents.sweep()
            self._operators.sweep()
            self._notifier.status(self._summary())
        every = self._notifier.watchdog_seconds
        if every is not None and now - self._fed >= every * 0.9:
            self._fed = now
            self._notifier.alive()
        self._rearm()

    def _rearm(self) -> None:
        """Keep one timer, at the core's next deadline or half a heartbeat, whichever is first."""
        due = self._core.next_deadline()
        if self._timer is not None and (due is None or due >= self._timer_at):
            return
        now = boottime_ms()
        when = now + self._config.settings.heartbeat // 2
        if self._notifier.watchdog_seconds is not None:
            when = min(when, now + int(self._notifier.watchdog_seconds * 500))
        if due is not None:
            when = min(when, max(due, now + 1))
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_later((when - now) / 1000, self._tick)

    def _summary(self) -> str:
        worlds = list(self._core.worlds.by_name.values())
        pairs = list(self._core.pairs.by_name.values())
        sealed = sum(world.sealed is not None for world in worlds)
        ready = sum(pair.state == "ready" for pair in pairs)
        return f"{sealed}/{len(worlds)} worlds sealed, {ready}/{len(pairs)} pairs ready"

    # --- the end --------------------------------------------------------------------------

    def _stop(self, why: str) -> None:
        if self._stopping.is_set():
            return
        self._notifier.stopping()
        self._log.info("daemon_stopping", why=why)
        self._stopping.set()
        self.on_stop(self._exit)

    def _fail(self, why: str) -> None:
        self._exit = 1
        self._stop(why)

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        why = str(context.get("message", "the loop failed"))
        self._log.error("daemon_failed", why=why, exc_info=context.get("exception"))
        self._fail(why)

    def _close(self, pool: ThreadPoolExecutor) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._agents.close()
        self._operators.close()
        pool.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        self._context.destroy(0)
        for endpoint in (*self._endpoints, self._operator_endpoint):
            if (path := ipc_path(endpoint)) is not None:
                path.unlink(missing_ok=True)


def run_daemon(config: DaemonConfig) -> int:
    """Serve in this process until told to stop; return the exit code.

    Whatever hangs once it stops (a disk that does not answer, a judgement under way), the process
    ends within two seconds of the signal.

    Raises:
        StartError: with what is in the way.
    """
    faulthandler.enable()
    daemon = Daemon(config)
    daemon.on_stop = _end_in_time
    return uvloop.run(daemon.run())


def _end_in_time(code: int) -> None:
    guard = threading.Timer(_STOP_SECONDS, os._exit, (code or 1,))
    guard.daemon = True
    guard.start()


def _raise_descriptor_limit(ranks: int, log: structlog.typing.FilteringBoundLogger) -> None:
    """Take the hard limit as soft limit, and say so when it is too low (cases D10, E06)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it; the lines below tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * ranks + 128
    shown = "unlimited" if hard == resource.RLIM_INFINITY else hard
    log.info("descriptor_limit", soft=soft, hard=shown, needed=needed)
    if soft != resource.RLIM_INFINITY and soft < needed:
        log.warning(
            "descriptor_limit_low",
            soft=soft,
            needed=needed,
            hint=f"set LimitNOFILE={needed} in the unit, or ulimit -n {needed}",
        )
