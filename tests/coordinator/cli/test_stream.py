"""Both ends of the demo's stream, against an agent that copies tensors itself."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankgate.agents.errors import NotReadyError, OpenDeniedError, PagesError
from rankgate.agents.events import AgentEvent, Outcome, Released, Wanted
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.destination import Destination
from rankgate.coordinator.cli.demo.job import Counts, Folder, Job, Journal, Result
from rankgate.coordinator.cli.demo.model import CacheModel
from rankgate.coordinator.cli.demo.pool import PagePool
from rankgate.coordinator.cli.demo.source import Source
from rankgate.proto.codes import Code
from rankgate.proto.findings import finding
from rankgate.proto.geometry import Interval

HEADS = Interval(0, 2)


def job(fault: str = "") -> Job:
    """Return a job of one rank each side."""
    model = CacheModel(
        name="m", model_type="llama", layers=(0, 1), kv_heads=2, head_dim=4, dtype="bfloat16"
    )
    return Job(
        daemon="",
        model=model,
        prefill_tp=1,
        decode_tp=1,
        page_size=2,
        pages=3,
        requests=6,
        concurrency=2,
        seed=1,
        profile="native",
        fault=fault,
        deadline=float("inf"),
    )


class DestinationAgent:
    """Delivers what is opened from a source's caches, by a script of faults."""

    def __init__(self, of: Job, caches: Caches) -> None:
        """Begin with a ready pair and nothing open."""
        self.job = of
        self.caches = caches
        self.pairs = [SimpleNamespace(source="prefill", source_epoch=1)]
        self.events: list[AgentEvent] = []
        self.opened: list[str] = []
        self.script: list[str] = []
        self._source = Caches(of, HEADS)

    def open(self, request: str, *, source: str, pages: list[int], ttl: float) -> None:
        """Deliver at once, or do what the script says next."""
        assert source == "prefill"
        assert ttl > 0
        todo = self.script.pop(0) if self.script else "deliver"
        if todo == "busy":
            raise PagesError("busy", [finding(Code.RANGE_BUSY, "pages")])
        if todo == "not ready":
            raise NotReadyError("not ready")
        self.opened.append(request)
        if todo == "denied":
            self.events.append(Outcome(request, 0, "denied", finding(Code.PAIR_NOT_READY, "pair")))
            return
        if todo == "refused":
            self.events.append(Outcome(request, 0, "denied", finding(Code.REQUEST_INVALID, "id")))
            return
        self._copy(request, pages)
        if todo == "lost":
            self.events.append(Outcome(request, 1, "failed", finding(Code.SOURCE_LOST, "request")))
            self.pairs = [SimpleNamespace(source="prefill", source_epoch=2)]
            return
        if todo == "corrupt":
            self.caches.keys[1].view(torch.uint8)[pages[0], 1, 0, 3] ^= 1
        if todo == "stray":
            other = next(page for page in range(self.job.pool) if page not in pages)
            self.caches.values[0].view(torch.uint8)[other, 0, 0, 0] = 9
        self.events.append(Outcome(request, 1, "delivered"))

    def _copy(self, request: str, pages: list[int]) -> None:
        here = torch.tensor(pages)
        self._source.fill(request, pages)
        for mine, theirs in zip(
            self.caches.keys + self.caches.values,
            self._source.keys + self._source.values,
            strict=True,
        ):
            mine[here] = theirs[here]

    def poll(self) -> list[AgentEvent]:
        """Return what has happened."""
        events, self.events = self.events, []
        return events


def destination(tmp_path: Path, *script: str, fault: str = "") -> tuple[Result, DestinationAgent]:
    """Run a destination to its end."""
    of = job(fault)
    caches = Caches(of, HEADS)
    agent: Any = DestinationAgent(of, caches)
    agent.script = list(script)
    result = Result(world="decode", rank=0)
    with closing(Journal(tmp_path / "journal")) as journal:
        Destination(agent, of, caches, PagePool(of.pool, seed=1), result).run(journal)
    return result, agent


def events(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what the destination wrote down."""
    return [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]


def test_every_byte_of_every_request_is_verified(tmp_path: Path) -> None:
    """Requests of 3, 2, 1, 3, 2, 1 pages, K and V of two layers, two heads of four bfloat16."""
    result, agent = destination(tmp_path)
    assert result.outcomes == {"delivered": 6}
    assert result.bytes_verified == 12 * 2 * 2 * 2 * 2 * 8
    assert result.mismatched_bytes == result.stray_bytes == 0
    assert agent.opened == [agent.job.request(index) for index in range(6)]


def test_one_wrong_byte_is_found(tmp_path: Path) -> None:
    """A single bit in one page is one mismatched byte, with its place."""
    result, agent = destination(tmp_path, "deliver", "corrupt")
    assert result.mismatched_bytes == 1
    place = "layer 1 k page 0 head 1 token 0 byte 3"
    assert result.first_mismatch == f"request {agent.job.request(1)} {place}"
    assert [event["wrong"] for event in events(tmp_path)] == [0, 1, 0, 0, 0, 0]


def test_a_byte_in_a_foreign_page_is_found(tmp_path: Path) -> None:
    """What lies in pages of no request is counted, too."""
    result, _ = destination(tmp_path, *["deliver"] * 5, "stray")
    assert result.mismatched_bytes == 0
    assert result.stray_bytes == 1


@pytest.mark.parametrize("trouble", ["busy", "not ready", "denied"])
def test_what_passes_is_tried_again(trouble: str, tmp_path: Path) -> None:
    """Pages that drain, a pair that is being restored and a retryable denial cost nothing."""
    result, _ = destination(tmp_path, trouble, trouble)
    assert result.outcomes == {"delivered": 6}
    assert result.mismatched_bytes == result.stray_bytes == 0


def test_what_does_not_pass_ends_the_rank(tmp_path: Path) -> None:
    """A denial that is not retryable is an error with its finding."""
    with pytest.raises(OpenDeniedError, match="RG901"):
        destination(tmp_path, "refused")


def test_a_lost_source_is_asked_again_under_its_next_epoch(tmp_path: Path) -> None:
    """With a source that dies the failed request is opened again, and its old pages never pass."""
    result, agent = destination(tmp_path, "deliver", "lost", fault=faults.DEAD_RANK)
    assert result.outcomes == {"delivered": 6, "failed": 1}
    assert result.mismatched_bytes == result.stray_bytes == 0
    assert agent.opened.count(agent.job.request(1)) == 2
    assert [e["code"] for e in events(tmp_path) if e["event"] == "failed"] == ["RG920"]


def test_without_a_planned_death_a_failure_is_final(tmp_path: Path) -> None:
    """A transfer that fails in a plain run is not hidden by another attempt."""
    result, _ = destination(tmp_path, "lost")
    assert result.outcomes == {"failed": 1, "delivered": 5}


class SourceAgent:
    """Releases what is staged, at the count it is told."""

    def __init__(self, folder: Folder, ended: int, wanted: list[str]) -> None:
        """Begin with nothing staged; the run ends when nothing is held or wanted any more."""
        self._folder = folder
        self._ended = ended
        self._wanted = wanted
        self.staged: list[str] = []
        self.held: list[str] = []
        self.most = 0
        self._before: list[str] = []

    def stage(self, request: str, pages: list[int], ttl: float) -> None:
        """Hold a request."""
        assert pages
        assert ttl > 0
        self.staged.append(request)
        self.held.append(request)
        self.most = max(self.most, len(self.held))

    def poll(self) -> Iterator[AgentEvent]:
        """Release the oldest when no more come, then want more, then end the run."""
        before, self._before = self._before, list(self.held)
        if self.held and self.held != before:
            return
        if self.held:
            yield Released(self.held.pop(0), "delivered", self._ended, 2)
        elif self._wanted:
            yield Wanted(self._wanted.pop(0))
        else:
            self._folder.finish()


def source(
    tmp_path: Path, *, ended: int = 2, ahead: bool = True, wanted: tuple[int, ...] = ()
) -> tuple[Result, SourceAgent]:
    """Run a source to its end."""
    of = job()
    folder = Folder(tmp_path)
    folder.prepare(of)
    agent: Any = SourceAgent(folder, ended, [of.request(index) for index in wanted])
    result = Result(world="prefill", rank=0)
    result.counts = Counts(
        source_epoch=1, destination_epoch=2, world_receive_count=1, receive_count=2, send_count=0
    )
    pool = PagePool(of.pool, seed=1)
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        Source(agent, of, Caches(of, HEADS), pool, result).run(folder, journal, ahead=ahead)
    assert sorted(pool.free) == list(range(of.pool))
    return result, agent


def test_a_source_stages_in_order_and_bounded(tmp_path: Path) -> None:
    """Never more than ``concurrency`` at once, each request once, and nothing stays."""
    result, agent = source(tmp_path)
    assert agent.staged == [job().request(index) for index in range(6)]
    assert agent.most == 2
    assert result.outcomes == {"delivered": 6}
    assert (result.staged_left, result.released_at_count, result.released_otherwise) == (0, 6, 0)


def test_a_restarted_source_stages_what_is_wanted(tmp_path: Path) -> None:
    """It does not know what has been delivered, so it waits to be asked."""
    _, agent = source(tmp_path, ahead=False, wanted=(4, 2))
    assert agent.staged == [job().request(4), job().request(2)]


@pytest.mark.parametrize(("ended", "by_outcome", "otherwise"), [(1, 6, 0), (3, 0, 6)])
def test_releases_are_told_apart_by_their_count(
    ended: int, by_outcome: int, otherwise: int, tmp_path: Path
) -> None:
    """An outcome may overtake the last end; more ends than the verdict's count may not be."""
    result, _ = source(tmp_path, ended=ended)
    assert (result.released_by_outcome, result.released_otherwise) == (by_outcome, otherwise)
