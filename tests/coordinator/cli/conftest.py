"""Views of a made-up daemon, for tests of what operators are shown."""

from types import SimpleNamespace
from typing import Any

import pytest

from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.views import (
    PairCountView,
    PairView,
    RankView,
    RefusalView,
    StatusView,
    TransferView,
    WorldView,
)

WRONG_COUNT = finding(
    Code.RECEIVE_COUNT_MISMATCH,
    "world_receive_count",
    Side("decode decode rank 3", "2"),
    Side("computed from the world sizes", "4"),
    detail="(pair prefill -> decode)",
)
RANK_GONE = finding(
    Code.RANK_MISSING,
    "world decode",
    Side("registered", "ranks 0-2 of 4"),
    Side("missing", "rank 3"),
)


def world(name: str, **changes: object) -> WorldView:
    """Return a sealed world of four ranks."""
    plain: dict[str, Any] = {
        "world": name,
        "role": name,
        "group": "",
        "state": "sealed",
        "epoch": 7,
        "size": 4,
        "have": 4,
        "missing": [],
        "receive_count": 4,
        "profile": "native",
        "round": "0badcafe",
        "since_ms": 51_234,
        "findings": [],
    }
    return WorldView(**(plain | changes))


def pair(state: str = "ready", findings: tuple[Finding, ...] = (), **changes: object) -> PairView:
    """Return a pair of two prefill and four decode ranks."""
    counts = [
        PairCountView(side="source", rank=rank, receive_count=2, send_count=0, linked=True)
        for rank in range(2)
    ]
    counts += [
        PairCountView(side="destination", rank=rank, receive_count=0, send_count=1, linked=True)
        for rank in range(4)
    ]
    plain: dict[str, Any] = {
        "source": "prefill",
        "source_epoch": 7,
        "destination": "decode",
        "destination_epoch": 8,
        "state": state,
        "profile": "native",
        "table_digest": "ab" * 16,
        "linked": 6,
        "ranks": 6,
        "waiting_for": [],
        "findings": list(findings),
        "counts": counts,
        "transfers": {"granted": 16, "delivered": 12},
    }
    return PairView(**(plain | changes))


def status(
    worlds: list[WorldView] | None = None,
    pairs: list[PairView] | None = None,
    refusals: list[RefusalView] | None = None,
    *,
    healthy: bool = True,
) -> StatusView:
    """Return a status."""
    return StatusView(
        version="0.1.0",
        instance="0123abcd",
        start=2,
        uptime_ms=61_234,
        endpoints=["ipc:///run/rankgate/agents.sock"],
        insecure=False,
        healthy=healthy,
        worlds=worlds or [],
        pairs=pairs or [],
        transfers={"granted": 16, "delivered": 12, "open": 4},
        refusals=refusals or [],
    )


def refusal(found: Finding, about: str = "pair prefill -> decode") -> RefusalView:
    """Return a refusal that was given three times."""
    return RefusalView(about=about, times=3, ago_ms=1234, finding=found)


def rank(number: int, **changes: object) -> RankView:
    """Return a live rank of the decode world."""
    plain: dict[str, Any] = {
        "world": "decode",
        "role": "decode",
        "rank": number,
        "state": "live",
        "coordinates": f"pp0 dp0 cp0 tp{number}",
        "incarnation": "aabbccdd",
        "host": "node-17",
        "address": "ipc:///x",
        "engine": "sglang 0.5.6",
        "heard_ms": 123,
        "unacked": 0,
        "staged": 3,
        "staged_bytes": 12_345_678,
        "landing": 0,
    }
    return RankView(**(plain | changes))


def transfer(request: str, **changes: object) -> TransferView:
    """Return a transfer that two ranks have not ended."""
    plain: dict[str, Any] = {
        "transfer": 1,
        "request": request,
        "attempt": 0,
        "source": "prefill",
        "destination": "decode",
        "state": "granted",
        "ended": [0, 1],
        "missing": [2, 3],
        "age_ms": 1234,
        "left_ms": 33_000,
        "finding": None,
    }
    return TransferView(**(plain | changes))


@pytest.fixture
def views() -> SimpleNamespace:
    """The functions above that make views, and two findings."""
    return SimpleNamespace(
        world=world,
        pair=pair,
        status=status,
        refusal=refusal,
        rank=rank,
        transfer=transfer,
        wrong_count=WRONG_COUNT,
        rank_gone=RANK_GONE,
    )
