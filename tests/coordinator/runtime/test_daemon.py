"""The whole daemon in a process of its own: starting, serving, losing peers, stopping."""

from __future__ import annotations

import contextlib
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from rankgate.proto.codec import encode
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.messages import (
    Heartbeat,
    Leave,
    NeedHello,
    Query,
    Refusal,
    Verdict,
    Welcome,
    WorldSealed,
)
from rankgate.proto.views import RankView, View
from tests.coordinator.core.harness import decode, prefill
from tests.coordinator.runtime.live import (
    PYTHONPATH,
    WAIT,
    Peer,
    Rank,
    Serving,
    ask_operator,
    clean_environment,
    hello,
    is_served,
    wait_until,
)


def ranks_of(serving: Serving) -> list[RankView]:
    """Return the view of all ranks."""
    ranks = ask_operator(serving.operator, "ranks").ranks
    assert ranks is not None
    return ranks


def descriptors() -> list[Descriptor]:
    """Return two worlds that fit: prefill tp1 and decode tp2."""
    jobs = (prefill(tp=1), decode(tp=2))
    return [one for job in jobs for one in job.members().values()]


def test_worlds_are_sealed_and_judged(serving: Serving) -> None:
    """Over real sockets: registration, seal, a verdict from the judging thread, and views."""
    serving.start()
    ranks = [Rank(serving.agents, one) for one in descriptors()]
    for rank in ranks:
        rank.join()
    for rank in ranks:
        sealed = rank.pushed(WorldSealed)
        assert isinstance(sealed, WorldSealed)
        verdict = rank.pushed(Verdict)
        assert isinstance(verdict, Verdict)
        assert verdict.accepted
    status = ask_operator(serving.operator, "status").status
    assert status is not None
    assert {world.state for world in status.worlds} == {"sealed"}
    assert status.endpoints == [serving.agents]
    assert not status.insecure
    for rank in ranks:
        rank.close()


def test_sealed_worlds_survive_kill_9(serving: Serving) -> None:
    """The next start has the same instance, a higher number, and never an epoch again."""
    first = serving.start()
    with Rank(serving.agents, prefill(tp=1).describe(0)) as rank:
        rank.join()
        sealed = rank.pushed(WorldSealed)
        assert isinstance(sealed, WorldSealed)
        serving.signal(signal.SIGKILL)
        serving.wait()
    second = serving.start()  # over the socket files that were left behind
    assert second["instance"] == first["instance"]
    assert (first["start"], second["start"]) == (1, 2)
    another = prefill("other", tp=1).describe(0)
    with Rank(serving.agents, another) as rank:
        rank.join()
        later = rank.pushed(WorldSealed)
        assert isinstance(later, WorldSealed)
        assert later.epoch > sealed.epoch


_RANK = """
import sys, time
sys.path[:0] = sys.argv[3].split(":")
from tests.coordinator.core.harness import prefill
from tests.coordinator.runtime.live import Rank
rank = Rank(sys.argv[1], prefill(tp=2).describe(int(sys.argv[2])))
rank.join()
print("joined", flush=True)
time.sleep(600)
"""


def test_a_killed_rank_is_shown_at_once(serving: Serving) -> None:
    """Long before any heartbeat is missed; the other rank stays."""
    serving.start("--ttl", "600", "--stall", "600", "--resume", "600")
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", _RANK, serving.agents, "1", f"{root}:{PYTHONPATH}"]
    with Rank(serving.agents, prefill(tp=2).describe(0)) as rank:
        rank.join()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=clean_environment()
        ) as victim:
            try:
                assert victim.stdout is not None
                assert victim.stdout.readline() == "joined\n"
                wait_until(lambda: [r.state for r in ranks_of(serving)] == ["live", "live"])
                begun = time.monotonic()
                victim.kill()
                wait_until(lambda: [r.state for r in ranks_of(serving)] == ["live", "disconnected"])
                assert time.monotonic() - begun < 2.0  # 0.1 on a quiet machine; ttl is 600
            finally:
                victim.kill()


def test_our_own_stall_stalls_nobody(serving: Serving) -> None:
    """A daemon that was stopped for longer than ttl takes no rank for silent when it wakes."""
    serving.start("--heartbeat", "100ms", "--ttl", "600ms", "--resume", "30")
    with Rank(serving.agents, prefill(tp=1).describe(0)) as rank:
        rank.join()
        rank.pushed(WorldSealed)
        assert [one.state for one in ranks_of(serving)] == ["live"]
        serving.signal(signal.SIGSTOP)
        time.sleep(1.2)  # two ttl; nothing can be heard from a stopped process
        rank.say(Heartbeat(session=rank.session))
        serving.signal(signal.SIGCONT)
        assert [one.state for one in ranks_of(serving)] == ["live"]
        story = ask_operator(serving.operator, "story", "world:p").story
        assert story is not None
        assert not [line for line in story if "stalled" in line], story


def test_it_stops_in_time_with_a_full_house(serving: Serving) -> None:
    """Exit 0 within two seconds although peers never read what is queued for them (case D08)."""
    serving.start()
    with Peer(serving.agents, rcvhwm=1, sndhwm=0) as deaf, Peer(serving.agents) as other:
        for _ in range(20_000):  # each is answered; nobody reads the answers
            deaf.raw(*encode(Leave(session=1), 1))
        assert isinstance(other.ask(hello()), Welcome)
        code, seconds = serving.stop()
    assert code == 0
    assert seconds < 2.0
    assert not (serving.folder / "agents.sock").exists()
    assert not (serving.folder / "operator.sock").exists()


def test_it_stops_during_a_flood(serving: Serving) -> None:
    """Signals are heard while messages come without pause."""
    serving.start()
    frames = encode(Heartbeat(session=1), 1)
    with Peer(serving.agents) as peer:
        begun = time.monotonic()
        stopping = False
        assert serving.process is not None
        while serving.process.poll() is None:
            for _ in range(100):
                if peer.socket.poll(1, 2):  # POLLOUT
                    with contextlib.suppress(zmq.Again):  # the daemon may have just gone
                        peer.socket.send_multipart(frames, 1)  # NOBLOCK
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
            if not stopping and time.monotonic() - begun > 0.3:
                stopping = True
                serving.signal(signal.SIGTERM)
                begun = time.monotonic()
            assert time.monotonic() - begun < WAIT
        assert time.monotonic() - begun < 2.0
    assert serving.wait() == 0


def test_a_second_daemon_names_the_first(serving: Serving, tmp_path: Path) -> None:
    """The same state directory: exit 75 with the directory and the pid; the first serves on."""
    serving.start()
    (tmp_path / "two").mkdir()
    second = Serving(tmp_path / "two")
    second.state = serving.state
    with pytest.raises(AssertionError):
        second.start()
    assert second.wait() == 75
    assert f"{serving.state} belongs to a running daemon (pid {serving.pid})" in second.lines[-1]
    assert is_served(serving.agents)


def test_an_endpoint_in_use_is_named(serving: Serving, tmp_path: Path) -> None:
    """Another state directory but the same socket: exit 75, and the first keeps its socket."""
    serving.start()
    (tmp_path / "two").mkdir()
    second = Serving(tmp_path / "two")
    with pytest.raises(AssertionError):
        second.start("--listen", serving.agents)
    assert second.wait() == 75
    assert f"cannot bind {serving.agents}: another process answers there" in second.lines[-1]
    assert is_served(serving.agents)


def test_a_configuration_error_ends_with_78(serving: Serving) -> None:
    """The line names key, value and source; nothing was opened."""
    with pytest.raises(AssertionError):
        serving.start("--ttl", "1")
    assert serving.wait() == 78
    assert "liveness.ttl = 1000 ms (from --ttl)" in serving.lines[-1]
    assert not list(serving.state.iterdir())


def test_too_few_descriptors_are_named(serving: Serving) -> None:
    """The warning has the directive and the number (cases D10, E06)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 1 << 29:
        hard = 1 << 29
    warned = serving.start("--max-ranks", str(hard), wait="descriptor_limit_low")
    assert warned["needed"] == 2 * hard + 128
    assert f"LimitNOFILE={2 * hard + 128}" in warned["hint"]


def test_sockets_keep_to_their_purpose(serving: Serving) -> None:
    """No query on the agents' socket, and no agent on the operators'."""
    serving.start()
    with Peer(serving.agents) as peer:
        assert isinstance(peer.ask(Query(view="status")), Refusal)
    with Peer(serving.operator) as peer:
        answer = peer.ask(hello())
        assert isinstance(answer, View)
        assert answer.finding is not None
        peer.raw(b"nonsense")
        assert isinstance(peer.hear()[1], Refusal)  # type: ignore[index]
        assert isinstance(peer.ask(Query(view="status")), View)


def test_a_session_of_another_life_is_not_honoured(serving: Serving) -> None:
    """Who speaks without a session is told so."""
    serving.start()
    with Peer(serving.agents) as peer:
        assert isinstance(peer.ask(Heartbeat(session=77)), NeedHello)


def test_insecure_is_shown(serving: Serving) -> None:
    """Plain tcp stands in the status, so that nobody forgets it."""
    ready = serving.start("--listen", serving.agents, "--listen", "tcp://127.0.0.1:0", "--insecure")
    status = ask_operator(serving.operator, "status").status
    assert status is not None
    assert status.insecure
    assert status.endpoints == ready["endpoints"]


def test_the_daemon_is_small(serving: Serving) -> None:
    """It never loads torch or numpy, and is idle within 60 MB."""
    serving.start()
    maps = Path(f"/proc/{serving.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    held = Path(f"/proc/{serving.pid}/status").read_text()
    (rss,) = (line for line in held.splitlines() if line.startswith("VmRSS"))
    assert int(rss.split()[1]) < 60 * 1024


def test_a_broken_store_ends_the_daemon(serving: Serving) -> None:
    """Loudly and not with 0: nothing that should have been durable has left."""
    serving.start()
    with Rank(serving.agents, prefill(tp=1).describe(0)) as rank:
        # The table goes away under the daemon: the next write fails.
        with sqlite3.connect(serving.state / "rankgate.db") as other:
            other.execute("DROP TABLE worlds")
        other.close()
        rank.join()
        failed = serving.logged("daemon_failed")
        assert "the store failed: no such table: worlds" in failed["why"]
        assert serving.wait() == 1
        while (heard := rank.hear(0.2)) is not None:
            assert not isinstance(heard[1], WorldSealed)


def test_both_ways_to_start_are_the_same(tmp_path: Path) -> None:
    """``python -m rankgate.coordinator.cli`` answers as ``rankgate`` does."""
    done = subprocess.run(
        [sys.executable, "-m", "rankgate.coordinator.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.stdout.startswith("rankgate, version ")


def test_help_imports_no_command(tmp_path: Path) -> None:
    """Help lists every command and loads none."""
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from rankgate.coordinator.cli.main import COMMANDS, main\n"
        "done = CliRunner().invoke(main, ['--help'])\n"
        "assert done.exit_code == 0\n"
        "assert all(name in done.output for name in COMMANDS)\n"
        "print([m for m in sys.modules if m.startswith('rankgate.coordinator.')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.stdout == "['rankgate.coordinator.cli', 'rankgate.coordinator.cli.main']\n"
