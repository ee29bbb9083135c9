"""What waits to be polled: nothing that somebody still needs is ever lost."""

from __future__ import annotations

from rankgate.agents.events import (
    AgentEvent,
    Arrived,
    Broken,
    Outcome,
    Released,
    Unpolled,
    Wanted,
)


def delivered(transfer: int) -> list[AgentEvent]:
    """Return the events of one transfer on a destination."""
    name = f"r{transfer}"
    return [Arrived(name, transfer), Outcome(name, transfer, "delivered")]


def test_without_a_limit_reached_everything_comes_once_and_in_order() -> None:
    """Two polls never see the same event."""
    unpolled = Unpolled()
    events = [Wanted("r"), *delivered(1), Released("r", "delivered", 1, 1), Broken("p", [])]
    for event in events:
        unpolled.add(event)
    assert unpolled.take() == events
    assert unpolled.take() == []
    unpolled.add(Outcome("r1", 1, "delivered"))
    assert len(unpolled) == 1


def test_who_never_polls_loses_only_what_its_handles_hold() -> None:
    """The oldest ended transfers go; releases, breaks and a transfer under way stay."""
    unpolled = Unpolled(limit=4)
    kept: list[AgentEvent] = [
        Arrived("r0", 999),
        Wanted("r"),
        Released("r", "failed", 0, 1),
        Broken("p", []),
    ]
    for event in kept:
        unpolled.add(event)
    for transfer in range(1, 100):
        for event in delivered(transfer):
            unpolled.add(event)
        unpolled.add(Outcome("r", 0, "denied"))
    last = Outcome("r0", 999, "failed")
    newest = [*delivered(99), Outcome("r", 0, "denied")]
    assert list(unpolled._events.values())[: len(kept)] == kept
    assert list(unpolled._events.values())[-3:] == newest
    assert len(unpolled) == len(kept) + 4
    unpolled.add(last)
    assert unpolled.take() == [*kept, *newest[1:], last]
