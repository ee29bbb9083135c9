"""What operators are shown: every view filled, bounded, and writable as JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from rankgate.coordinator.core import journal as journal_module
from rankgate.coordinator.core import showing
from rankgate.coordinator.core.events import QueryArrived
from rankgate.coordinator.core.journal import Journal
from rankgate.coordinator.core.settings import Settings
from rankgate.proto import __version__
from rankgate.proto.codec import decode, encode
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import Query
from rankgate.proto.views import VIEW_SCHEMA, StatusView, View
from tests.coordinator.core.harness import Bench, codes, prefill
from tests.coordinator.core.harness import decode as decode_job


def busy_bench() -> Bench:
    """Return a bench with a ready pair, a rejected one, a forming world and transfers."""
    bench = Bench(Settings(grant_ttl=30_000))
    ours, theirs = bench.pair(prefill(tp=2), decode_job(tp=2))
    bench.seal(prefill("bad", page_size=4))
    bench.agents(prefill("half", tp=2, group="g"))[1].join()
    for number in range(4):
        transfer = theirs[0].grant(f"r{number}").transfer
        if number:
            theirs[0].end(transfer)
        if number > 1:
            theirs[1].end(transfer, "delivered" if number == 2 else "failed")
    theirs[0].open("")
    bench.wait(1500)
    ours[0].bench.now += 1
    return bench


def status_of(bench: Bench) -> StatusView:
    """Return the status view."""
    status = bench.query("status").status
    assert status is not None
    return status


def test_F08_the_status_says_everything_at_a_glance() -> None:
    """Version, identity, uptime, worlds, pairs, totals, refusals."""
    bench = busy_bench()
    status = status_of(bench)
    assert status.version == __version__
    assert status.instance == bench.identity.instance.hex()[:8]
    assert (status.start, status.uptime_ms) == (1, 1501)
    assert (status.endpoints, status.insecure) == (["ipc:///x"], False)
    assert not status.healthy
    worlds = {row.world: row for row in status.worlds}
    assert worlds["p"].state == "sealed"
    assert worlds["p"].epoch == 1
    assert (worlds["p"].size, worlds["p"].have, worlds["p"].missing) == (2, 2, [])
    assert (worlds["p"].receive_count, worlds["p"].profile) == (2, "native")
    assert (worlds["p"].role, worlds["p"].group) == ("prefill", "")
    assert len(worlds["p"].round) == 8
    assert worlds["p"].since_ms == 1501
    assert worlds["half"].state == "forming"
    assert (worlds["half"].have, worlds["half"].missing) == (1, [0])
    assert (worlds["half"].group, worlds["half"].receive_count) == ("g", 0)
    assert status.transfers == {
        "granted": 4,
        "delivered": 1,
        "failed": 1,
        "denied": 1,
        "open": 2,
    }
    refused = {row.finding.slug: row for row in status.refusals}
    assert {"page_size_mismatch", "request_invalid"} <= set(refused)
    assert refused["request_invalid"].about == "open by d"
    assert (refused["request_invalid"].times, refused["request_invalid"].ago_ms) == (1, 1501)


def test_F03_healthy_needs_every_world_sealed_and_fit_and_every_pair_ready() -> None:
    """One missing, stalled or rejected thing is not healthy; unpaired worlds are."""
    bench = Bench()
    assert status_of(bench).healthy
    bench.seal(decode_job("alone", group="x"))
    assert status_of(bench).healthy
    ours, theirs = bench.seal(prefill(tp=2)), bench.seal(decode_job())
    assert not status_of(bench).healthy
    bench.link(*ours, *theirs)
    assert status_of(bench).healthy
    ours[1].drop()
    assert not status_of(bench).healthy
    ours[1].reconnect()
    ours[1].hello(session=ours[1].session)
    assert status_of(bench).healthy


def test_F03_every_rank_has_a_row_also_the_missing_ones() -> None:
    """Rank 3 of 8 that is not there is a row of its own."""
    bench = Bench()
    agents = bench.agents(prefill(tp=8))
    for agent in agents:
        if agent.rank != 3:
            agent.join()
    rows = {row.rank: row for row in bench.query("ranks").ranks or []}
    assert len(rows) == 8
    assert rows[3].state == "missing"
    live = rows[5]
    assert (live.state, live.coordinates, live.engine) == ("live", "pp0 dp0 cp0 tp5", "fake 1")
    assert (live.host, live.address) == ("host", "tcp://10.0.0.1:9005")
    assert live.incarnation == agents[5].incarnation.hex()[:8]
    assert (live.heard_ms, live.unacked) == (0, 0)


def test_pairs_show_counts_states_and_transfers() -> None:
    """Each pair with its verdict, digest, counts per rank and what it moved."""
    bench = busy_bench()
    rows = {row.source: row for row in bench.query("pairs").pairs or []}
    good, bad = rows["p"], rows["bad"]
    assert (good.state, good.destination, good.profile) == ("ready", "d", "native")
    assert (good.source_epoch, good.destination_epoch) == (1, 2)
    assert len(good.table_digest) == 32
    assert (good.linked, good.ranks, good.waiting_for) == (4, 4, [])
    assert [(c.side, c.rank, c.linked) for c in good.counts] == [
        ("source", 0, True),
        ("source", 1, True),
        ("destination", 0, True),
        ("destination", 1, True),
    ]
    assert good.transfers == {"granted": 4, "delivered": 1, "failed": 1}
    assert (bad.state, bad.counts, bad.transfers) == ("rejected", [], {})
    assert "page_size_mismatch" in codes(bad.findings)


def test_transfers_show_who_has_not_ended_and_since_when() -> None:
    """Open ones first, oldest first; then the ended ones, latest first."""
    bench = busy_bench()
    rows = bench.query("transfers").transfers or []
    assert [row.request for row in rows] == ["r0", "r1", "r3", "r2"]
    first, second, failed, _ = rows
    assert (first.state, first.ended, first.missing) == ("granted", [], [0, 1])
    assert (first.age_ms, first.left_ms) == (1501, 28_499)
    assert (first.source, first.destination, first.attempt) == ("p", "d", 0)
    assert (second.ended, second.missing) == ([0], [1])
    assert (failed.state, failed.missing) == ("failed", [])
    assert failed.finding is not None


def test_rows_of_transfers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open ones take precedence; never more rows than allowed (and one ended)."""
    monkeypatch.setattr(showing, "_MOST_ROWS", 3)
    bench = Bench()
    _, theirs = bench.pair(prefill(), decode_job())
    for number in range(5):
        theirs[0].end(theirs[0].grant(f"done{number}").transfer)
    assert [row.request for row in bench.query("transfers").transfers or []] == [
        "done4",
        "done3",
        "done2",
    ]
    for number in range(2):
        theirs[0].grant(f"open{number}")
    rows = [row.request for row in bench.query("transfers").transfers or []]
    assert rows == ["open0", "open1", "done4"]
    for number in range(2, 5):
        theirs[0].grant(f"open{number}")
    rows = [row.request for row in bench.query("transfers").transfers or []]
    assert rows[:3] == ["open0", "open1", "open2"]
    assert len(rows) <= 4


@pytest.mark.parametrize("view", ["status", "ranks", "pairs", "transfers", "story", "soup"])
def test_F08_every_view_is_json_and_travels(view: str) -> None:
    """The same struct as JSON with a schema number and over the wire."""
    bench = busy_bench()
    shown = bench.query(view, "world:p")
    text = json.loads(msgspec.json.encode(shown))
    assert text.get("schema", VIEW_SCHEMA) == VIEW_SCHEMA
    assert msgspec.json.decode(msgspec.json.encode(shown), type=View) == shown
    assert decode(encode(shown, 1))[1] == shown
    if view == "soup":
        assert shown.finding is not None
        assert "'soup'" in shown.finding.message
        assert "status, ranks, pairs, transfers, story" in shown.finding.message
    else:
        assert text[view]


def test_a_query_changes_nothing() -> None:
    """Two equal questions give two equal answers and no other effect."""
    bench = busy_bench()
    before = bench.query("status")
    effects = bench.step(QueryArrived(b"op", 7, Query(view="status")))
    assert len(effects) == 1
    assert bench.query("status") == before


def test_a_world_without_any_rank_keeps_its_row_and_says_who_is_missing() -> None:
    """All its ranks crashed: the name stays, with why."""
    bench = Bench()
    bench.seal(prefill())[0].drop()
    bench.wait(bench.settings.resume, beating=())
    (row,) = status_of(bench).worlds
    assert (row.state, row.size, row.have, row.missing) == ("forming", 1, 0, [0])
    assert codes(row.findings) == ["world_broken"]
    assert bench.query("ranks").ranks == []


# --- the journal ---------------------------------------------------------------------------------


def test_stories_are_bounded_in_lines_and_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest lines and the least recently told subjects go first."""
    monkeypatch.setattr(journal_module, "_STORY_SUBJECTS", 2)
    journal = Journal(3)
    for number in range(100):
        journal.record("a", number, f"line {number}")
    assert len(journal.story("a")) == 64
    assert journal.story("a")[0] == (36, "line 36")
    journal.record("b", 1, "x")
    journal.record("a", 2, "y")
    journal.record("c", 3, "z")
    assert journal.story("b") == []
    assert journal.story("a")
    assert journal.story("c") == [(3, "z")]


def test_refusals_are_counted_and_bounded() -> None:
    """Equal ones are one entry that moves to the end; the oldest goes first."""
    journal = Journal(2)
    one, two, three = (finding(Code.BUSY, "x", Side("who", value)) for value in ("1", "2", "3"))
    journal.refuse("a", one, 10)
    journal.refuse("a", two, 20)
    journal.refuse("a", one, 30)
    assert [(r.finding, r.times, r.last) for r in journal.refusals()] == [
        (two, 1, 20),
        (one, 2, 30),
    ]
    journal.refuse("b", one, 40)
    journal.refuse("a", three, 50)
    assert [(r.about, r.finding) for r in journal.refusals()] == [("b", one), ("a", three)]


def test_long_lists_come_in_pages_that_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page fits a message and says where the next one begins; the last one says 0."""
    monkeypatch.setattr(showing, "_PAGE_ROWS", 3)
    bench = Bench()
    bench.pair(prefill(tp=4), decode_job(tp=4))
    bench.seal(decode_job("d2", tp=2))
    ranks, offset, pages = [], 0, 0
    while True:
        bench.step(QueryArrived(b"op", 1, Query(view="ranks", offset=offset)))
        view = bench.views[-1]
        assert view.ranks is not None
        assert 1 <= len(view.ranks) <= 3
        ranks += [(row.world, row.rank) for row in view.ranks]
        pages, offset = pages + 1, view.next
        if not offset:
            break
    assert ranks == [("p", r) for r in range(4)] + [("d", r) for r in range(4)] + [
        ("d2", 0),
        ("d2", 1),
    ]
    assert pages == 4
    bench.step(QueryArrived(b"op", 1, Query(view="pairs")))
    first = bench.views[-1]
    assert first.pairs is not None
    assert (len(first.pairs), first.next) == (1, 1)
    status = bench.query("status").status
    assert status is not None
    assert all(pair.counts == [] for pair in status.pairs)
