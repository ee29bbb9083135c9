"""The demo through the real command line: a real daemon, real torchrun, real tensors."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

SMALL = ("--layers", "2", "--pages", "4", "--requests", "6", "--concurrency", "2")


class Done(NamedTuple):
    """A finished demo."""

    exit_code: int
    report: dict[str, Any]

    def counts(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return (receive_count, send_count) by side and rank, as the pair's view has them."""
        (pair,) = self.report["pairs"]
        return {
            (item["side"], item["rank"]): (item["receive_count"], item["send_count"])
            for item in pair["counts"]
        }

    def refusal(self, code: str) -> dict[str, Any]:
        """Return the one refusal with this code."""
        (found,) = [item for item in self.report["refusals"] if item["code"] == code]
        assert isinstance(found, dict)
        return found


def demo(*flags: str) -> Done:
    """Run the demo and return its exit code and its one JSON document."""
    command = [sys.executable, "-m", "rankgate.coordinator.cli", "demo", "--json", "--timeout"]
    done = subprocess.run(
        [*command, "60", *SMALL, *flags], capture_output=True, text=True, timeout=80, check=False
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    sys.stderr.write(done.stderr + json.dumps(report["problems"]))  # shown when a test fails
    assert done.returncode == report["exit"]
    return Done(done.returncode, report)


def assert_clean(report: dict[str, Any]) -> None:
    """Every request delivered, every byte as expected, nothing left."""
    assert report["problems"] == []
    assert report["requests"]["delivered"] == report["requests"]["total"] == 6
    assert report["mismatched_bytes"] == report["staged_left"] == report["landing_left"] == 0


def test_two_to_four_moves_every_byte() -> None:
    """Prefill tp 2 to decode tp 4: each source counts two, each destination hears one."""
    done = demo()
    assert_clean(done.report)
    assert done.exit_code == 0
    assert done.counts() == {
        ("source", 0): (2, 0),
        ("source", 1): (2, 0),
        **{("destination", rank): (0, 1) for rank in range(4)},
    }
    pages = 4 + 3 + 2 + 1 + 4 + 3
    whole = pages * 16 * 2 * 2 * 8 * 128 * 2  # tokens a page, layers, K and V, heads, dim, bf16
    assert done.report["bytes"] == whole
    assert done.report["bytes_sent"] == done.report["bytes_received"] == whole
    assert {world["world"]: world["receive_count"] for world in done.report["worlds"]} == {
        "prefill": 2,
        "decode": 4,
    }
    assert not [item for item in done.report["refusals"] if item["seen_by"]]


def test_four_to_two_with_replicated_heads_counts_notices() -> None:
    """Two heads over four sources: each counts one, two of them by notice, no byte twice."""
    done = demo("--prefill-tp", "4", "--decode-tp", "2", "--kv-heads", "2")
    assert_clean(done.report)
    assert done.exit_code == 0
    assert done.counts() == {
        **{("source", rank): (1, 0) for rank in range(4)},
        ("destination", 0): (0, 1),
        ("destination", 1): (0, 1),
    }
    assert done.report["bytes_sent"] == done.report["bytes"]
    sent = [rank["bytes_moved"] for rank in done.report["worlds"][0]["ranks"]]
    assert sorted(sent)[:2] == [0, 0]


def assert_refused(done: Done, code: str) -> dict[str, Any]:
    """Both worlds and status saw it within five seconds, and no byte moved."""
    assert done.report["problems"] == []
    assert done.exit_code == 3
    assert done.report["bytes_sent"] == done.report["bytes_received"] == 0
    assert done.report["refused_after_seconds"] <= 5
    refusal = done.refusal(code)
    assert refusal["in_status"]
    assert refusal["hint"]
    assert refusal["field"] in refusal["message"]
    return refusal


def test_break_count_names_the_rank_and_both_numbers() -> None:
    """A rank that claims 1 where 2 was broadcast is refused by name, before any byte."""
    done = demo("--break", "count", "--prefill-tp", "1", "--decode-tp", "2")
    refusal = assert_refused(done, "RG601")
    assert refusal["slug"] == "receive_count_mismatch"
    assert [side["value"] for side in refusal["sides"]] == ["1", "2"]
    assert "decode rank 1" in refusal["sides"][0]["who"]
    assert refusal["seen_by"] == ["prefill rank 0", "decode rank 0", "decode rank 1"]


def test_break_state_missing_names_the_component() -> None:
    """Three state components against two is refused with the one that is missing."""
    done = demo("--break", "state-missing", "--prefill-tp", "1", "--decode-tp", "1")
    refusal = assert_refused(done, "RG510")
    assert refusal["field"] == "state[MAMBA]"
    assert refusal["seen_by"] == ["prefill rank 0", "decode rank 0"]


def test_break_rank_missing_names_the_rank() -> None:
    """A rank that never registers is named to its own world and to the other one."""
    done = demo("--break", "rank-missing", "--prefill-tp", "1", "--decode-tp", "2")
    refusal = assert_refused(done, "RG104")
    assert {"who": "missing", "value": "rank 1"} in refusal["sides"]
    assert refusal["seen_by"] == ["prefill rank 0", "decode rank 0"]


def test_break_dead_rank_pairs_again_and_finishes() -> None:
    """After kill -9 of a prefill rank the world comes back under a new epoch and finishes."""
    done = demo("--break", "dead-rank", "--prefill-tp", "2", "--decode-tp", "2")
    assert done.report["problems"] == []
    assert done.exit_code == 3
    assert done.report["requests"]["delivered"] == 6
    assert done.report["mismatched_bytes"] == done.report["staged_left"] == 0
    prefill, decode = done.report["worlds"]
    assert len(prefill["epochs"]) == 2
    assert len(decode["epochs"]) == 1
    assert prefill["epoch"] == max(prefill["epochs"]) > decode["epoch"]
