"""Real agents over real sockets with a real daemon: every byte compared, nothing left staged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankgate.agents.agent import RankAgent
from rankgate.agents.errors import NotReadyError, PagesError, PairRejectedError
from rankgate.agents.events import Outcome, Wanted
from rankgate.agents.handles import Transfer
from tests.agents.engines import PATIENCE, Engines, wait_until
from tests.coordinator.runtime.live import Serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A daemon that serves all tests of this file on ipc; their worlds leave in between."""
    daemon = Serving(tmp_path_factory.mktemp("rg"))
    daemon.start()
    yield daemon
    daemon.end()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Serving]:
    """A daemon that a test may kill."""
    daemon = Serving(tmp_path)
    daemon.start()
    yield daemon
    daemon.end()


def deliver(
    sources: Engines, destinations: Engines, request: str, ours: list[int], theirs: list[int]
) -> None:
    """Stage and open one request everywhere, and compare every byte."""
    for rank in sources:
        rank.fill(request, ours)
        rank.agent.stage(request, pages=ours)
    opened: list[Transfer] = [
        rank.agent.open(request, source=sources.world, pages=theirs) for rank in destinations
    ]
    for rank, transfer in zip(destinations, opened, strict=True):
        outcome = transfer.wait(PATIENCE)
        assert outcome.delivered, outcome
        assert rank.wrong(request, theirs) == 0
    wait_until(lambda: all(rank.released(request) for rank in sources), "released")
    for rank in sources:
        (released,) = rank.released(request)
        assert (released.reason, released.ended) == ("delivered", released.receive_count)
        assert rank.agent.stats().staged == 0


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("tp_source", "tp_destination", "heads"), [(2, 2, 4), (2, 4, 4), (4, 2, 4), (4, 2, 2)]
)
def test_every_byte_of_real_tensors_arrives_for_sizes_that_differ(
    serving: Serving, tp_source: int, tp_destination: int, heads: int, layout: str
) -> None:
    """2:2, 1:2, 2:1 and replicated heads (by notice): bytes, counts, releases, no stray byte."""
    with (
        Engines(serving.agents, "p", "prefill", tp_source, heads=heads, layout=layout) as sources,
        Engines(serving.agents, "d", "decode", tp_destination, heads=heads, layout=layout) as ends,
    ):
        sources.ready("d")
        ends.ready("p")
        deliver(sources, ends, "req-1", [0, 1, 2, 7], [9, 3, 4, 5])
        for rank in ends:
            assert rank.stray([9, 3, 4, 5]) == 0
        deliver(sources, ends, "req-2", [3], [11])


def test_a_request_that_is_opened_first_is_wanted_and_then_served(serving: Serving) -> None:
    """The presentation waits for staging; the engine sees Wanted."""
    with (
        Engines(serving.agents, "p", "prefill", 1) as sources,
        Engines(serving.agents, "d", "decode", 1) as ends,
    ):
        ends.ready("p")
        transfer = ends[0].agent.open("req-1", source="p", pages=[2, 3])
        wait_until(lambda: any(isinstance(event, Wanted) for event in sources[0].poll()), "wanted")
        sources[0].fill("req-1", [5, 6])
        sources[0].agent.stage("req-1", pages=[5, 6])
        assert transfer.wait(PATIENCE).delivered
        assert ends[0].wrong("req-1", [2, 3]) == 0


def test_pages_that_belong_to_a_transfer_are_refused_without_the_daemon(serving: Serving) -> None:
    """range_busy and pages_invalid are raised by open itself (B16)."""
    with (
        Engines(serving.agents, "p", "prefill", 1),
        Engines(serving.agents, "d", "decode", 1) as ends,
    ):
        ends.ready("p")
        agent = ends[0].agent
        agent.open("req-1", source="p", pages=[2, 3])
        for pages, slug in (([3, 4], "range_busy"), ([99], "pages_invalid"), ([4, 4], "pages_inv")):
            with pytest.raises(PagesError) as caught:
                agent.open("req-2", source="p", pages=pages)
            assert caught.value.findings[0].slug.startswith(slug)


def test_a_request_that_is_opened_again_has_one_handle(serving: Serving) -> None:
    """Before the answer, after it and with its renewal: one outcome, which every wait sees."""
    with (
        Engines(serving.agents, "p", "prefill", 1) as sources,
        Engines(serving.agents, "d", "decode", 1) as ends,
    ):
        ends.ready("p")
        agent = ends[0].agent
        first = agent.open("req-1", source="p", pages=[2, 3])
        assert agent.open("req-1", source="p", pages=[2, 3]) is first
        wait_until(lambda: first.id, "granted")
        assert agent.open("req-1", source="p", pages=[2, 3]) is first
        with pytest.raises(PagesError) as caught:
            agent.open("req-1", source="p", pages=[2, 4])
        assert caught.value.findings[0].slug == "conflicting_open"
        sources[0].fill("req-1", [5, 6])
        sources[0].agent.stage("req-1", pages=[5, 6])
        assert first.wait(PATIENCE).delivered
        outcomes = [event for event in ends[0].poll() if isinstance(event, Outcome)]
        assert outcomes == [first.outcome]
        assert not agent._opened
        assert not agent._transfers


def test_an_abort_right_after_an_open_ends_it(serving: Serving) -> None:
    """Answered by then or not: it is denied here, or aborted as soon as it is granted."""
    with (
        Engines(serving.agents, "p", "prefill", 1),
        Engines(serving.agents, "d", "decode", 1) as ends,
    ):
        ends.ready("p")
        agent = ends[0].agent
        transfer = agent.open("req-1", source="p", pages=[2, 3])
        agent.abort("req-1", "the client left")
        wait_until(lambda: transfer.denied or transfer.outcome, "ended")
        if transfer.outcome is not None:
            assert transfer.outcome.outcome == "aborted"
        wait_until(lambda: agent.stats().landing == 0, "drained")


def test_a_wrong_count_of_one_engine_is_named_to_both_worlds(serving: Serving) -> None:
    """Seed 1: the claim, the computed number and the rank stand in the finding (B01)."""
    with (
        Engines(serving.agents, "p", "prefill", 2, claims={"world_receive_count": 3}) as sources,
        Engines(serving.agents, "d", "decode", 2) as ends,
    ):
        for engine, other in ((sources[0], "d"), (ends[1], "p")):
            with pytest.raises(PairRejectedError) as caught:
                engine.agent.wait_ready(other, timeout=PATIENCE)
            found = caught.value.findings[0]
            assert found.slug == "receive_count_mismatch"
            assert {side.value for side in found.sides} == {"3", "2"}


def test_waiting_for_a_world_that_is_not_there_says_so(serving: Serving) -> None:
    """Time is up: the error names what is missing, not only that it took too long."""
    with (
        Engines(serving.agents, "d", "decode", 1) as ends,
        pytest.raises(NotReadyError, match="p is not sealed"),
    ):
        ends[0].agent.wait_ready("p", timeout=0.5)


def test_a_restarted_daemon_is_found_again_by_itself(mortal: Serving) -> None:
    """kill -9 and start: agents register anew, epochs stay, the next request is served (C23)."""
    with (
        Engines(mortal.agents, "p", "prefill", 2) as sources,
        Engines(mortal.agents, "d", "decode", 2) as ends,
    ):
        sources.ready("d")
        ends.ready("p")
        deliver(sources, ends, "req-1", [0, 1], [2, 3])
        before = ends[0].agent.pairs[0]
        mortal.signal(signal.SIGKILL)
        mortal.wait()
        mortal.start()
        sources.ready("d")
        ends.ready("p")
        wait_until(lambda: _opens(ends, "probe"), "opens again")
        after = ends[0].agent.pairs[0]
        assert (after.source_epoch, after.destination_epoch) == (
            before.source_epoch,
            before.destination_epoch,
        )
        deliver(sources, ends, "req-2", [4, 5], [6, 7])


def _opens(ends: Engines, request: str) -> bool:
    """Whether the daemon answers an open with a grant."""
    try:
        transfer = ends[0].agent.open(request, source="p", pages=[11], ttl=0.2)
    except (NotReadyError, PagesError):
        return False
    wait_until(lambda: transfer.id or transfer.denied, "an answer")
    return bool(transfer.id)


def test_sixteen_agents_on_one_host_have_sixteen_addresses(serving: Serving) -> None:
    """Every agent binds an address of its own choosing and registers the real one (C21)."""
    with Engines(serving.agents, "p", "prefill", 16, heads=16) as ranks:
        wait_until(lambda: all(rank.agent.world for rank in ranks), "sealed")
        addresses = {rank.agent._bound.address for rank in ranks}
        assert len(addresses) == 16
        folders = [Path(address.removeprefix("ipc://")).parent for address in addresses]
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_an_agent_that_leaves_is_gone_at_once(serving: Serving) -> None:
    """A closed agent says so: its world breaks without waiting for the resume time."""
    with Engines(serving.agents, "d", "decode", 2) as ends:
        wait_until(lambda: all(rank.agent.world for rank in ends), "sealed")
        ends[0].agent.close()
        wait_until(lambda: ends[1].agent.world is None, "broken", seconds=1.5)


def test_a_forked_child_is_told_so_and_the_parent_goes_on(serving: Serving) -> None:
    """The child gets an error that names fork, without an abort; the parent still works (D09)."""
    with Engines(serving.agents, "d", "decode", 1) as ends:
        agent: RankAgent = ends[0].agent
        agent.wait_registered(PATIENCE)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                agent.poll()
                text = "no error"
            except RuntimeError as error:
                text = str(error)
            os.write(write, text.encode())
            agent.close()
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert "fork" in os.read(read, 4096).decode()
        os.close(read)
        assert agent.poll() == []
        wait_until(lambda: agent.world, "sealed")
