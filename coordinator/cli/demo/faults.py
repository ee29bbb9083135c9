"""The faults that ``--break`` puts in, and what must be seen of each for it to count.

A fault passes only on evidence: what the ranks wrote down themselves, and what the daemon's
operator view says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rankgate.coordinator.cli.demo.job import DECODE, PREFILL, Job, Result
from rankgate.coordinator.cli.demo.watch import RankNotes, Watch
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding
from rankgate.proto.views import StatusView

COUNT: Final = "count"
STATE_MISSING: Final = "state-missing"
RANK_MISSING: Final = "rank-missing"
DEAD_RANK: Final = "dead-rank"
FAULTS: Final = (COUNT, STATE_MISSING, RANK_MISSING, DEAD_RANK)

LIMIT_SECONDS: Final = 5.0
"""A refusal must be seen everywhere so soon after the fault's last input reached the daemon."""

STATE_KINDS: Final = ("SWA", "DSA", "MAMBA")
"""State components of the prefill world under ``state-missing``; decode lacks the last."""


class Refusal(NamedTuple):
    """What the refusal of a fault must say."""

    code: Code
    values: tuple[str, ...]
    """Each must stand in a side's value."""
    holders: tuple[str, ...]
    """Each must stand in a side's holder or value: the ranks at fault."""


def faulty_rank(job: Job) -> int:
    """Return the decode rank that a fault is put into: the last one."""
    return job.decode_tp - 1


def claimed_count(job: Job) -> int:
    """Return the wrong count of ``count``: what the prefill world's size would give."""
    return job.prefill_tp if job.prefill_tp != job.decode_tp else job.decode_tp + 1


def claims(job: Job, world: str, rank: int) -> dict[str, int]:
    """Return the counts that a rank claims of its own."""
    if job.fault == COUNT and (world, rank) == (DECODE, faulty_rank(job)):
        return {"world_receive_count": claimed_count(job)}
    return {}


def state_kinds(job: Job, world: str) -> tuple[str, ...]:
    """Return the kinds of state that a world's ranks declare."""
    if job.fault != STATE_MISSING:
        return ()
    return STATE_KINDS if world == PREFILL else STATE_KINDS[:-1]


def registers(job: Job, world: str, rank: int) -> bool:
    """Return whether a rank registers at all."""
    return job.fault != RANK_MISSING or (world, rank) != (DECODE, faulty_rank(job))


def expected_refusal(job: Job) -> Refusal:
    """Return what the refusal of the job's fault must say."""
    rank = f"rank {faulty_rank(job)}"
    if job.fault == COUNT:
        values = (str(claimed_count(job)), str(job.decode_tp))
        return Refusal(Code.RECEIVE_COUNT_MISMATCH, values, (f"{DECODE} {rank}",))
    if job.fault == STATE_MISSING:
        values = (f"{len(STATE_KINDS)} components", f"{len(STATE_KINDS) - 1} components")
        return Refusal(Code.STATE_COMPONENT_MISSING, values, (PREFILL, DECODE))
    return Refusal(Code.RANK_MISSING, (f"of {job.decode_tp}", rank), (rank,))


def shows(found: Finding, expected: Refusal) -> bool:
    """Return whether a finding is the expected one, with field, both values, ranks and hint."""
    values = [side.value for side in found.sides]
    words = [text for side in found.sides for text in (side.who, side.value)]
    return (
        (found.code, found.slug) == (expected.code.id, expected.code.slug)
        and bool(found.field and found.hint)
        and all(any(value in each for each in values) for value in expected.values)
        and all(any(holder in each for each in words) for holder in expected.holders)
    )


def status_findings(status: StatusView) -> list[Finding]:
    """Return every finding in a status view."""
    found = [item for world in status.worlds for item in world.findings]
    found += [item for pair in status.pairs for item in pair.findings]
    found += [item.finding for item in status.refusals]
    return found


class Evidence(NamedTuple):
    """What is judged after a run with a fault."""

    job: Job
    watch: Watch
    results: Sequence[Result]
    status: StatusView
    status_seen_at: float | None
    """When the status view first showed the refusal."""


def refusal_in(findings: Iterable[Finding], job: Job) -> Finding | None:
    """Return the job's expected refusal among findings."""
    expected = expected_refusal(job)
    return next((found for found in findings if shows(found, expected)), None)


def told(job: Job, notes: RankNotes) -> bool:
    """Return whether a rank has been told the job's refusal, or is the one that is not there."""
    silent = not registers(job, notes.world, notes.rank)
    return silent or refusal_in(notes.findings, job) is not None


def missing_refusal(evidence: Evidence) -> list[str]:
    """Return what was not seen of a refusal; empty when all was."""
    job, watch = evidence.job, evidence.watch
    code = expected_refusal(job).code
    name = f"{code.id} {code.slug}"
    missing = [
        f"{notes.world} rank {notes.rank} was not told {name} with field, values, ranks and hint"
        for notes in watch.ranks
        if not told(job, notes)
    ]
    if refusal_in(status_findings(evidence.status), job) is None:
        missing.append(f"the status view does not show {name} with field, values, ranks and hint")
    moved = sum(result.bytes_moved for result in evidence.results)
    if moved:
        missing.append(f"{moved} bytes moved before the refusal; expected 0")
    after = seconds_to_refusal(evidence)
    if after is not None and after > LIMIT_SECONDS:
        missing.append(f"the refusal took {after:.1f} s; expected at most {LIMIT_SECONDS:g} s")
    return missing


def seconds_to_refusal(evidence: Evidence) -> float | None:
    """Return the seconds from the fault's last input to the last one who saw the refusal.

    The last input is the last registration; for ``count`` it is the claim, which the ranks send
    as they link, so this counts from before it.
    """
    started = [n.registered_at for n in evidence.watch.ranks if n.registered_at is not None]
    seen = [n.refused_at for n in evidence.watch.ranks if n.refused_at is not None]
    if evidence.status_seen_at is not None:
        seen.append(evidence.status_seen_at)
    return max(seen) - max(started) if started and seen else None


def missing_recovery(evidence: Evidence) -> list[str]:
    """Return what was not seen of a killed prefill rank and the world's return."""
    job, watch = evidence.job, evidence.watch
    missing: list[str] = []
    for notes in watch.of(DECODE):
        if not notes.broken:
            missing.append(f"decode rank {notes.rank} was not told that the pair broke")
        if len(notes.delivered) != job.requests:
            missing.append(
                f"decode rank {notes.rank} has {len(notes.delivered)} of {job.requests} requests"
            )
    for notes in watch.of(PREFILL):
        if notes.lives < 2:  # noqa: PLR2004 - before and after
            missing.append(f"prefill rank {notes.rank} was not restarted")
        elif len(set(notes.epochs)) < 2:  # noqa: PLR2004 - before and after
            missing.append(f"prefill rank {notes.rank} saw epochs {notes.epochs}; expected two")
    if not any(codes for notes in watch.of(DECODE) for codes in notes.failed.values()):
        missing.append("no request was under way when the rank died")
    return missing


def refusals_seen(evidence: Evidence) -> list[dict[str, Any]]:
    """Return every distinct refusal with who saw it, as the report shows it."""
    seen: dict[Finding, list[str]] = {}
    for notes in evidence.watch.ranks:
        for found in (*notes.findings, *notes.broken):
            who = seen.setdefault(found, [])
            name = f"{notes.world} rank {notes.rank}"
            if name not in who:
                who.append(name)
    shown = status_findings(evidence.status)
    for found in shown:
        seen.setdefault(found, [])
    return [
        {
            "code": found.code,
            "slug": found.slug,
            "severity": found.severity,
            "field": found.field,
            "message": found.message,
            "sides": [{"who": side.who, "value": side.value} for side in found.sides],
            "hint": found.hint,
            "seen_by": who,
            "in_status": found in shown,
        }
        for found, who in seen.items()
    ]
