"""A fault counts only when everything that must be seen of it has been seen."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.faults import Evidence
from rankgate.coordinator.cli.demo.job import Counts, Folder, Job, Journal, Result
from rankgate.coordinator.cli.demo.model import CacheModel
from rankgate.coordinator.cli.demo.report import make_report
from rankgate.coordinator.cli.demo.watch import Watch
from rankgate.proto.findings import Finding, Side
from rankgate.proto.views import StatusView

COUNTS = {"prefill": (2, 0), "decode": (0, 1)}


def job(fault: str = "") -> Job:
    """Return a job of two prefill and four decode ranks."""
    model = CacheModel(
        name="m", model_type="llama", layers=(0,), kv_heads=8, head_dim=64, dtype="bfloat16"
    )
    return Job(
        daemon="ipc://x",
        model=model,
        prefill_tp=2,
        decode_tp=4,
        page_size=16,
        pages=2,
        requests=3,
        concurrency=2,
        seed=1,
        profile="native",
        fault=fault,
        deadline=0.0,
    )


class Story:
    """The journals and results of a made-up run."""

    def __init__(self, root: Path, fault: str = "") -> None:
        """Begin with nothing written."""
        self.job = job(fault)
        self.folder = Folder(root)
        self.folder.prepare(self.job)
        self.results = {
            (world, rank): Result(
                world=world,
                rank=rank,
                counts=Counts(
                    source_epoch=1,
                    destination_epoch=2,
                    world_receive_count=4,
                    receive_count=COUNTS[world][0],
                    send_count=COUNTS[world][1],
                ),
                outcomes={"delivered": 3},
                bytes_moved=10,
                bytes_verified=10,
            )
            for world in COUNTS
            for rank in range(self.job.tp(world))
        }

    def write(self, event: str, **fields: object) -> None:
        """Append an event to every rank's journal."""
        for world, rank in self.results:
            journal = Journal(self.folder.journal(world, rank))
            journal.write(event, **fields)
            journal.close()

    def refuse(self, found: Finding) -> None:
        """Let every rank register and be refused, with nothing moved."""
        self.write("started", pid=1)
        self.write("registered")
        self.write("refused", findings=[msgspec.to_builtins(found)])
        for result in self.results.values():
            result.bytes_moved = result.bytes_verified = 0

    def deliver(self) -> None:
        """Let every rank take every request."""
        self.write("started", pid=1)
        self.write("registered")
        for index in range(self.job.requests):
            self.write("delivered", request=self.job.request(index), bytes=1)

    def evidence(self, status: StatusView) -> Evidence:
        """Return what is judged."""
        watch = Watch(self.folder, self.job)
        watch.read()
        began = [notes.registered_at for notes in watch.ranks if notes.registered_at]
        seen = max(began) + 1 if began else None
        return Evidence(self.job, watch, list(self.results.values()), status, seen)


def report(
    story: Story, views: SimpleNamespace, status: StatusView | None = None
) -> dict[str, Any]:
    """Return the report of a story whose daemon shows a ready pair."""
    found = status or views.status([views.world("prefill"), views.world("decode")], [views.pair()])
    made = make_report(story.evidence(found), found.pairs, {"transfer": 1.0})
    json.dumps(made)
    return made


def test_a_clean_run_is_exit_0(tmp_path: Path, views: SimpleNamespace) -> None:
    """Everything delivered, nothing left, counts as the daemon shows them."""
    story = Story(tmp_path)
    story.deliver()
    made = report(story, views)
    assert made["problems"] == []
    assert made["exit"] == 0
    assert made["bytes"] == 60
    assert made["requests"] == {
        "total": 3,
        "delivered": 3,
        "failed_attempts": 0,
        "transfers": {"granted": 16, "delivered": 12, "open": 4},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mismatched_bytes": 1, "first_mismatch": "page 3"}, "1 bytes differ: page 3"),
        ({"stray_bytes": 2}, "2 bytes lie in pages of no request"),
        ({"staged_left": 1}, "1 requests staged and 0 landing"),
        ({"landing_left": 1}, "0 requests staged and 1 landing"),
        ({"released_otherwise": 1}, "1 released at another count"),
        ({"outcomes": {"delivered": 2, "expired": 1}}, "2 of 3 requests delivered"),
        ({"counts": None}, "was never told its counts"),
    ],
)
def test_each_blemish_is_exit_1(
    change: dict[str, Any], words: str, tmp_path: Path, views: SimpleNamespace
) -> None:
    """One thing that is not as it should be makes the run fail, in words with the rank."""
    story = Story(tmp_path)
    story.deliver()
    key = ("decode", 3)
    story.results[key] = msgspec.structs.replace(story.results[key], **change)
    made = report(story, views)
    assert made["exit"] == 1
    assert any("decode rank 3" in problem and words in problem for problem in made["problems"])


def test_counts_other_than_the_daemons_are_exit_1(tmp_path: Path, views: SimpleNamespace) -> None:
    """A rank that works with another count than `pairs` shows is told."""
    story = Story(tmp_path)
    story.deliver()
    story.results["prefill", 1].counts = Counts(
        source_epoch=1,
        destination_epoch=2,
        world_receive_count=4,
        receive_count=4,
        send_count=0,
    )
    assert any("`pairs` shows (2, 0)" in text for text in report(story, views)["problems"])


def test_a_rank_without_result_is_exit_1(tmp_path: Path, views: SimpleNamespace) -> None:
    """A rank that left nothing behind has not agreed to anything."""
    story = Story(tmp_path)
    story.deliver()
    del story.results["decode", 0]
    assert "decode rank 0 left no result" in report(story, views)["problems"]


def test_a_refusal_seen_by_all_is_exit_3(tmp_path: Path, views: SimpleNamespace) -> None:
    """Code, field, both values, rank and hint at every rank and in status, and no byte moved."""
    story = Story(tmp_path, faults.COUNT)
    story.refuse(views.wrong_count)
    status = views.status(pairs=[views.pair("rejected", (views.wrong_count,))], healthy=False)
    made = report(story, views, status)
    assert made["problems"] == []
    assert made["exit"] == 3
    (refusal,) = made["refusals"]
    assert refusal["code"] == "RG601"
    assert refusal["in_status"]
    assert len(refusal["seen_by"]) == 6
    assert made["refused_after_seconds"] < 5


def test_a_refusal_without_a_fault_is_exit_1(tmp_path: Path, views: SimpleNamespace) -> None:
    """Flags that no plan fits end as one problem with the code, not as one a rank."""
    story = Story(tmp_path)
    story.refuse(views.wrong_count)
    for result in story.results.values():
        result.findings = [views.wrong_count]
    made = report(story, views, views.status(refusals=[views.refusal(views.wrong_count)]))
    assert made["exit"] == 1
    assert made["problems"] == ["refused, though no fault was put in: RG601 receive_count_mismatch"]


def test_a_refusal_that_status_does_not_show_is_exit_1(
    tmp_path: Path, views: SimpleNamespace
) -> None:
    """What operators cannot see has not been shown."""
    story = Story(tmp_path, faults.COUNT)
    story.refuse(views.wrong_count)
    made = report(story, views, views.status())
    assert made["exit"] == 1
    assert any("status view" in problem for problem in made["problems"])


def test_bytes_moved_before_a_refusal_are_exit_1(tmp_path: Path, views: SimpleNamespace) -> None:
    """A refusal after the first byte came too late."""
    story = Story(tmp_path, faults.COUNT)
    story.refuse(views.wrong_count)
    story.results["decode", 0].bytes_moved = 5
    status = views.status(refusals=[views.refusal(views.wrong_count)])
    assert report(story, views, status)["problems"] == [
        "5 bytes moved before the refusal; expected 0"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"code": "RG602"},
        {"field": ""},
        {"hint": ""},
        {"sides": (Side("decode decode rank 3", "2"),)},
        {"sides": (Side("decode decode rank 1", "2"), Side("computed", "4"))},
    ],
)
def test_a_refusal_without_one_of_its_parts_is_exit_1(
    change: dict[str, Any], tmp_path: Path, views: SimpleNamespace
) -> None:
    """Another code, no field, no hint, one value only or the wrong rank is not that refusal."""
    story = Story(tmp_path, faults.COUNT)
    story.refuse(msgspec.structs.replace(views.wrong_count, **change))
    status = views.status(refusals=[views.refusal(views.wrong_count)])
    made = report(story, views, status)
    assert made["exit"] == 1
    assert len(made["problems"]) == 6


def test_a_missing_rank_is_named(tmp_path: Path, views: SimpleNamespace) -> None:
    """The refusal of a rank that never registers names it, and how many there are."""
    story = Story(tmp_path, faults.RANK_MISSING)
    story.refuse(views.rank_gone)
    status = views.status(refusals=[views.refusal(views.rank_gone)])
    assert report(story, views, status)["exit"] == 3


def test_a_dead_rank_needs_a_new_epoch_and_all_requests(
    tmp_path: Path, views: SimpleNamespace
) -> None:
    """Without break, restart and repeated requests the death has not been seen."""
    story = Story(tmp_path, faults.DEAD_RANK)
    story.deliver()
    problems = report(story, views)["problems"]
    assert "decode rank 0 was not told that the pair broke" in problems
    assert "prefill rank 1 was not restarted" in problems
    assert "no request was under way when the rank died" in problems


def test_a_journal_is_read_by_whole_lines(tmp_path: Path) -> None:
    """A line that is still being written is taken when it is complete."""
    story = Story(tmp_path)
    watch = Watch(story.folder, story.job)
    path = story.folder.journal("decode", 2)
    path.write_text('{"event": "started", "at": 1, "pid": 7}\n{"event": "compl')
    watch.read()
    assert [notes.pid for notes in watch.of("decode")] == [0, 0, 7, 0]
    with path.open("a") as file:
        file.write('ete", "at": 2}\n')
    watch.read()
    assert [notes.complete for notes in watch.of("decode")] == [False, False, True, False]
