"""What the demo found out: one document, printed as a table or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.faults import Evidence
from rankgate.coordinator.cli.demo.job import DECODE, PREFILL, Job, Result
from rankgate.coordinator.cli.tables import short_ranks, size, transfers_sentence
from rankgate.proto.findings import ranks_text
from rankgate.proto.views import PairView

REPORT_SCHEMA: Final = 1
"""Version of the JSON; a field is never renamed or removed within one."""

EXIT_AGREED = 0
EXIT_NO = 1
EXIT_REFUSED = 3


def make_report(
    evidence: Evidence, pairs: Sequence[PairView], seconds: dict[str, float]
) -> dict[str, Any]:
    """Return the report of a run; ``exit`` is the exit code that follows from it."""
    job, results = evidence.job, evidence.results
    problems = _problems(evidence, pairs)
    expected = EXIT_REFUSED if job.fault else EXIT_AGREED
    refusing = job.fault and job.fault != faults.DEAD_RANK
    after = faults.seconds_to_refusal(evidence) if refusing else None
    return {
        "schema": REPORT_SCHEMA,
        "exit": EXIT_NO if problems else expected,
        "break": job.fault or None,
        "model": {
            "name": job.model.name,
            "layers": list(job.model.layers),
            "kv_heads": job.model.kv_heads,
            "head_dim": job.model.head_dim,
            "dtype": job.model.dtype,
            "page_size": job.page_size,
        },
        "profile": job.profile,
        "worlds": [_world(evidence, world) for world in (PREFILL, DECODE)],
        "pairs": [_pair(pair) for pair in pairs],
        "requests": _requests(evidence),
        "bytes": sum(result.bytes_verified for result in results),
        "bytes_sent": _total(results, PREFILL, "bytes_moved"),
        "bytes_received": _total(results, DECODE, "bytes_moved"),
        "mismatched_bytes": sum(r.mismatched_bytes + r.stray_bytes for r in results),
        "first_mismatch": next((r.first_mismatch for r in results if r.first_mismatch), ""),
        "staged_left": sum(result.staged_left for result in results),
        "landing_left": sum(result.landing_left for result in results),
        "refusals": faults.refusals_seen(evidence),
        "refused_after_seconds": None if after is None else round(after, 3),
        "problems": problems,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _problems(evidence: Evidence, pairs: Sequence[PairView]) -> list[str]:
    """Return in words what keeps the run from being as it should."""
    job, results = evidence.job, evidence.results
    wrote = {(result.world, result.rank) for result in results}
    found = [
        f"{notes.world} rank {notes.rank} left no result"
        for notes in evidence.watch.ranks
        if (notes.world, notes.rank) not in wrote
    ]
    for result in results:
        name = f"{result.world} rank {result.rank}"
        if result.mismatched_bytes:
            found.append(f"{name}: {result.mismatched_bytes} bytes differ: {result.first_mismatch}")
        if result.stray_bytes:
            found.append(f"{name}: {result.stray_bytes} bytes lie in pages of no request")
        if result.staged_left or result.landing_left:
            left = f"{result.staged_left} requests staged and {result.landing_left} landing"
            found.append(f"{name}: {left} at the end; expected none")
        if result.released_otherwise:
            found.append(f"{name}: {result.released_otherwise} released at another count")
    if job.fault == faults.DEAD_RANK:
        return found + faults.missing_recovery(evidence) + _disagreements(results, pairs)
    if job.fault:
        return found + faults.missing_refusal(evidence)
    refused = {f"{found.code} {found.slug}" for r in results for found in r.findings}
    if refused:
        return [*found, f"refused, though no fault was put in: {', '.join(sorted(refused))}"]
    for result in results:
        done = result.outcomes.get("delivered", 0)
        if done != job.requests:
            name = f"{result.world} rank {result.rank}"
            found.append(f"{name}: {done} of {job.requests} requests delivered")
    return found + _disagreements(results, pairs)


def _disagreements(results: Sequence[Result], pairs: Sequence[PairView]) -> list[str]:
    """Return where a rank works with other counts than the daemon shows to operators."""
    shown = {
        (item.side, item.rank): (item.receive_count, item.send_count)
        for pair in pairs
        for item in pair.counts
    }
    found = []
    for result in results:
        side = "source" if result.world == PREFILL else "destination"
        name = f"{result.world} rank {result.rank}"
        if result.counts is None:
            found.append(f"{name} was never told its counts")
            continue
        has = (result.counts.receive_count, result.counts.send_count)
        if shown.get((side, result.rank)) != has:
            seen = shown.get((side, result.rank))
            found.append(f"{name} has (receive_count, send_count) {has}; `pairs` shows {seen}")
    return found


def _world(evidence: Evidence, world: str) -> dict[str, Any]:
    view = next((item for item in evidence.status.worlds if item.world == world), None)
    notes = evidence.watch.of(world)
    return {
        "world": world,
        "role": world,
        "tp": evidence.job.tp(world),
        "state": view.state if view else "absent",
        "epoch": view.epoch if view else 0,
        "epochs": sorted({epoch for each in notes for epoch in each.epochs}),
        "receive_count": view.receive_count if view else 0,
        "ranks": [_rank(result) for result in evidence.results if result.world == world],
    }


def _rank(result: Result) -> dict[str, Any]:
    counts = result.counts
    return {
        "rank": result.rank,
        "receive_count": counts.receive_count if counts else None,
        "send_count": counts.send_count if counts else None,
        "outcomes": result.outcomes,
        "bytes_moved": result.bytes_moved,
        "bytes_verified": result.bytes_verified,
        "mismatched_bytes": result.mismatched_bytes + result.stray_bytes,
        "released_at_count": result.released_at_count,
        "released_by_outcome": result.released_by_outcome,
        "staged_left": result.staged_left,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
    }


def _pair(pair: PairView) -> dict[str, Any]:
    return {
        "source": pair.source,
        "source_epoch": pair.source_epoch,
        "destination": pair.destination,
        "destination_epoch": pair.destination_epoch,
        "state": pair.state,
        "profile": pair.profile,
        "table_digest": pair.table_digest,
        "counts": [
            {
                "side": item.side,
                "rank": item.rank,
                "receive_count": item.receive_count,
                "send_count": item.send_count,
            }
            for item in pair.counts
        ],
    }


def _requests(evidence: Evidence) -> dict[str, Any]:
    """Return requests by how they ended, and the daemon's count of transfers by state.

    ``failed_attempts`` counts those that were repeated.
    """
    notes = evidence.watch.of(DECODE)
    attempts = Counter(
        {
            request: max(len(each.failed.get(request, ())) for each in notes)
            for request in {name for each in notes for name in each.failed}
        }
    )
    return {
        "total": evidence.job.requests,
        "delivered": evidence.watch.delivered,
        "failed_attempts": attempts.total(),
        "transfers": evidence.status.transfers,
    }


def _total(results: Sequence[Result], world: str, field: str) -> int:
    return sum(getattr(result, field) for result in results if result.world == world)


def print_json(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report as one JSON document on stdout."""
    (console or Console()).file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def print_report(report: dict[str, Any], job: Job, console: Console | None = None) -> None:
    """Print the report for people: verdict, one table of ranks, totals, refusals, problems."""
    console = console or Console(highlight=False)
    good = report["exit"] != EXIT_NO
    console.print(Text(_verdict(report), style="bold green" if good else "bold red"))
    model = job.model
    console.print(
        Text(
            f"{model.name}: {len(model.layers)} layers, {model.kv_heads} KV heads of"
            f" {model.head_dim}, {model.dtype}, pages of {job.page_size}, profile {job.profile}",
            style="dim",
        )
    )
    console.print()
    console.print(_ranks_table(report))
    console.print()
    console.print(_totals(report))
    for refusal in report["refusals"]:
        console.print()
        _print_refusal(refusal, console)
    for problem in report["problems"]:
        console.print(Text(f"problem: {problem}", style="bold red"))


def _verdict(report: dict[str, Any]) -> str:
    if report["exit"] == EXIT_NO:
        count = len(report["problems"])
        return f"not as it should be: {count} {'problem' if count == 1 else 'problems'}, at the end"
    if report["exit"] == EXIT_REFUSED and report["break"] == faults.DEAD_RANK:
        return "the rank's death was told to all, and the world paired again and finished"
    if report["exit"] == EXIT_REFUSED:
        after = report["refused_after_seconds"]
        return f"refused as expected, {after:.1f} s after the last rank registered; no byte moved"
    seconds = report["seconds"]["transfer"]
    rate = report["bytes"] / 1e6 / max(seconds, 0.001)
    return (
        f"every byte as expected: {report['requests']['delivered']} requests,"
        f" {size(report['bytes'])} in {seconds:.1f} s ({rate:.0f} MB/s)"
    )


def _ranks_table(report: dict[str, Any]) -> Table:
    """Return one line for all ranks of a world that have the same numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name, side in (
        ("world", "left"),
        ("epoch", "left"),
        ("ranks", "left"),
        ("receive_count", "right"),
        ("send_count", "right"),
        ("requests", "right"),
        ("bytes", "right"),
        ("wrong", "right"),
        ("staged", "right"),
    ):
        table.add_column(name, justify="left" if side == "left" else "right", no_wrap=True)
    for world in report["worlds"]:
        epochs = " → ".join(str(epoch) for epoch in world["epochs"]) or str(world["epoch"] or "-")
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in world["ranks"]:
            alike.setdefault(_row(world["world"], rank), []).append(rank["rank"])
        for row, ranks in alike.items():
            table.add_row(world["world"], epochs, short_ranks(ranks), *row)
        if not world["ranks"]:
            table.add_row(world["world"], epochs, "-")
    return table


def _row(world: str, rank: dict[str, Any]) -> tuple[str, ...]:
    source = world == PREFILL
    receive, send = rank["receive_count"], rank["send_count"]
    return (
        "-" if receive is None or not source else str(receive),
        "-" if send is None or source else str(send),
        str(rank["outcomes"].get("delivered", 0)),
        size(rank["bytes_moved"]),
        "-" if source else str(rank["mismatched_bytes"]),
        str(rank["staged_left"]) if source else "-",
    )


def _totals(report: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    counts = ", ".join(
        f"{world['world']} {world['receive_count'] or '-'}" for world in report["worlds"]
    )
    requests = report["requests"]
    again = requests["failed_attempts"]
    table.add_row("receive_count of the worlds", counts)
    table.add_row(
        "requests",
        f"{requests['delivered']} of {requests['total']} delivered"
        + (f", {again} failed first and were repeated" if again else ""),
    )
    table.add_row("transfers", transfers_sentence(requests["transfers"]))
    sources = [rank for world in report["worlds"] for rank in world["ranks"]]
    at_count = sum(rank["released_at_count"] for rank in sources)
    by_outcome = sum(rank["released_by_outcome"] for rank in sources)
    table.add_row(
        "released",
        f"{at_count} at receive_count"
        + (f", {by_outcome} whose outcome came before the last end" if by_outcome else ""),
    )
    table.add_row("bytes verified", f"{report['bytes']} ({size(report['bytes'])})")
    table.add_row("mismatched bytes", str(report["mismatched_bytes"]))
    table.add_row("staged left", str(report["staged_left"]))
    phases = (f"{name} {value:.1f} s" for name, value in report["seconds"].items())
    table.add_row("time", ", ".join(phases))
    if steps := _per_transfer(report):
        table.add_row("per transfer", steps)
    return table


def _per_transfer(report: dict[str, Any]) -> str:
    """Return how long the steps of a transfer took a decode rank on average."""
    ranks = [rank for world in report["worlds"] for rank in world["ranks"]]
    ranks = [rank for rank in ranks if rank["send_count"] and rank["outcomes"]]
    count = sum(sum(rank["outcomes"].values()) for rank in ranks)
    if not count:
        return ""
    steps = (("grant", "open to grant"), ("data", "to data"), ("outcome", "to outcome"))
    return ", ".join(
        f"{words} {1000 * sum(rank['seconds'].get(name, 0) for rank in ranks) / count:.1f} ms"
        for name, words in steps
    )


def _print_refusal(refusal: dict[str, Any], console: Console) -> None:
    style = "bold red" if refusal["severity"] == "error" else "bold yellow"
    console.print(Text(f"{refusal['code']} {refusal['slug']}", style=style))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("field", Text(refusal["field"]))
    for side in refusal["sides"]:
        table.add_row("value", Text.assemble((side["value"], "bold"), f"  {side['who']}"))
    table.add_row("hint", Text(refusal["hint"]))
    seen = _grouped(refusal["seen_by"]) + (["rankgate status"] if refusal["in_status"] else [])
    table.add_row("seen by", Text(", ".join(seen) or "nobody"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _grouped(names: Sequence[str]) -> list[str]:
    """Return ``WORLD rank R`` names with the ranks of a world put together."""
    worlds: dict[str, list[int]] = {}
    for name in names:
        world, _, rank = name.partition(" rank ")
        worlds.setdefault(world, []).append(int(rank))
    return [f"{world} {ranks_text(ranks)}" for world, ranks in worlds.items()]
