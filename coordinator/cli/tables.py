"""Views as people read them: plain tables that fit 80 columns, wider ones where there is room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankgate.proto.findings import Finding, ranks_text
from rankgate.proto.views import (
    PairCountView,
    PairView,
    RankView,
    StatusView,
    TransferView,
    WorldView,
)

WIDE = 110
"""From this many columns on, tables show what is nice to have, too."""

MOST_ENDED = 20
"""Ended transfers in a table."""

OPEN = {"granted", "aborting"}
GOOD = {"sealed", "ready", "live", "delivered", "granted"}
BAD = {"rejected", "gone", "missing", "failed", "stalled", "disconnected", "expired"}


class Shown(NamedTuple):
    """A finding, what it is about, and how often and when it was given last."""

    about: str
    finding: Finding
    times: int = 1
    ago_ms: int | None = None


def stdout_console() -> Console:
    """Return a console for data: colours only on a terminal, NO_COLOR and COLUMNS honoured."""
    return Console(highlight=False, soft_wrap=False)


def print_status(status: StatusView, console: Console | None = None) -> None:
    """Print health in one sentence, then worlds, pairs, transfers, and every refusal."""
    console = console or stdout_console()
    style = "bold green" if status.healthy else "bold red"
    console.print(Text(health_sentence(status), style=style))
    guard = "  INSECURE: plain tcp is open" if status.insecure else ""
    console.print(
        Text(
            f"rankgate {status.version}, start {status.start}, up {duration(status.uptime_ms)},"
            f" at {', '.join(status.endpoints) or 'no endpoint'}{guard}",
            style="dim",
        )
    )
    if status.worlds:
        console.print()
        console.print(worlds_table(status.worlds, console.width))
    if status.pairs:
        console.print()
        console.print(pairs_table(status.pairs))
    console.print()
    console.print(Text(f"transfers  {transfers_sentence(status.transfers)}"))
    print_findings(findings_of(status), console)


def print_ranks(ranks: Sequence[RankView], console: Console | None = None) -> None:
    """Print one line a rank; with room also address, incarnation and engine."""
    console = console or stdout_console()
    if not ranks:
        console.print("no rank has registered")
        return
    wide = console.width >= WIDE
    table = _table("world", "rank>", "state", "place", "heard>", "staged>", "landing>", "host")
    if wide:
        table.add_column("incarnation")
        table.add_column("engine")
        table.add_column("unacked", justify="right")
    for rank in ranks:
        staged = f"{rank.staged} ({size(rank.staged_bytes)})" if rank.staged else "0"
        row = [
            Text(rank.world),
            Text(str(rank.rank)),
            _state(rank.state),
            Text(rank.coordinates),
            Text("-" if rank.state == "missing" else duration(rank.heard_ms)),
            Text(staged),
            Text(str(rank.landing)),
            Text(rank.host or "-"),
        ]
        if wide:
            row += [Text(rank.incarnation), Text(rank.engine or "-"), Text(str(rank.unacked))]
        table.add_row(*row)
    console.print(table)


def print_pairs(pairs: Sequence[PairView], console: Console | None = None) -> None:
    """Print every pair, its ranks' counts (equal neighbours in one line) and its findings."""
    console = console or stdout_console()
    if not pairs:
        console.print("no pair: two sealed worlds of one transfer group make one")
        return
    for index, pair in enumerate(pairs):
        if index:
            console.print()
        console.print(pairs_table([pair]))
        if pair.counts:
            console.print(Padding(counts_table(pair.counts), (0, 0, 0, 2)))
        if pair.waiting_for:
            console.print(Text(f"  waits for {', '.join(pair.waiting_for)}"))
        if pair.table_digest:
            console.print(
                Text(f"  profile {pair.profile}, table digest {pair.table_digest}", style="dim")
            )
        print_findings([Shown(pair_name(pair), found) for found in pair.findings], console)


def print_transfers(transfers: Sequence[TransferView], console: Console | None = None) -> None:
    """Print open transfers with the ranks that have not ended, then the latest ended ones."""
    console = console or stdout_console()
    if not transfers:
        console.print("no transfer is known")
        return
    table = _table("request", "pair", "state", "ended", "not ended", "age>", "left>", gap=1)
    shown = [item for item in transfers if item.state in OPEN]
    ended = [item for item in transfers if item.state not in OPEN]
    for item in (*shown, *ended[:MOST_ENDED]):
        attempt = f" #{item.attempt}" if item.attempt else ""
        table.add_row(
            Text(f"{item.request}{attempt}"),
            Text(f"{item.source} → {item.destination}"),
            _state(item.state),
            Text(short_ranks(item.ended)),
            Text(short_ranks(item.missing), style="red" if item.missing else ""),
            Text(duration(item.age_ms)),
            Text(duration(item.left_ms)),
        )
    console.print(table)
    if len(ended) > MOST_ENDED:
        console.print(f"and {len(ended) - MOST_ENDED} more that have ended; -o json shows all")
    listed = (*shown, *ended[:MOST_ENDED])
    found = [Shown(f"transfer {item.request}", item.finding) for item in listed if item.finding]
    print_findings(found, console)


def health_sentence(status: StatusView) -> str:
    """Return whether all is well, in one sentence, naming what is not."""
    if not status.healthy:
        troubles = "; ".join(_troubles(status))
        return f"not healthy: {troubles or 'a rank is stalled or disconnected (rankgate ranks)'}"
    if not status.worlds:
        return "healthy: no world has registered yet"
    sealed = sum(world.state == "sealed" for world in status.worlds)
    ready = sum(pair.state == "ready" for pair in status.pairs)
    return (
        f"healthy: {sealed} of {len(status.worlds)} worlds sealed,"
        f" {ready} of {len(status.pairs)} pairs ready"
    )


def _troubles(status: StatusView) -> Iterable[str]:
    for world in status.worlds:
        if world.state != "sealed":
            absent = f", {ranks_text(world.missing)} missing" if world.missing else ""
            have = f"({world.have} of {world.size}{absent})"
            yield f"world {world.world} is {world.state} {have}{_codes(world.findings)}"
    for pair in status.pairs:
        if pair.state == "rejected":
            yield f"pair {pair_name(pair)} is rejected{_codes(pair.findings)}"
        elif pair.state != "ready" or pair.waiting_for:
            waits = f", waits: {', '.join(pair.waiting_for)}" if pair.waiting_for else ""
            yield f"pair {pair_name(pair)} is {pair.state}{waits}"


def _codes(findings: Sequence[Finding]) -> str:
    names = dict.fromkeys(f"{found.code} {found.slug}" for found in findings if found.is_error)
    return f": {', '.join(names)}" if names else ""


def worlds_table(worlds: Sequence[WorldView], width: int) -> Table:
    """Return one line a world."""
    wide = width >= WIDE
    table = _table("world", "role", "state", "epoch>", "ranks>", "receive_count>", "missing")
    if wide:
        for name in ("profile", "group", "round", "since"):
            table.add_column(name)
    for world in worlds:
        row = [
            Text(world.world),
            Text(world.role),
            _state(world.state),
            Text(str(world.epoch or "-")),
            Text(f"{world.have}/{world.size}"),
            Text(str(world.receive_count or "-")),
            Text(short_ranks(world.missing), style="bold red" if world.missing else ""),
        ]
        if wide:
            row += [
                Text(world.profile),
                Text(world.group or "-"),
                Text(world.round),
                Text(duration(world.since_ms)),
            ]
        table.add_row(*row)
    return table


def pairs_table(pairs: Sequence[PairView]) -> Table:
    """Return one line a pair."""
    table = _table("pair", "verdict", "epochs", "linked>", "transfers")
    for pair in pairs:
        table.add_row(
            Text(pair_name(pair)),
            _state(pair.state),
            Text(f"{pair.source_epoch or '-'} → {pair.destination_epoch or '-'}"),
            Text(f"{pair.linked}/{pair.ranks}"),
            Text(transfers_sentence(pair.transfers)),
        )
    return table


def counts_table(counts: Sequence[PairCountView]) -> Table:
    """Return a pair's counts: one line for all ranks of a side that share them."""
    table = _table("side", "ranks", "receive_count>", "send_count>", "linked")
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for item in counts:
        alike[item.side, item.receive_count, item.send_count, item.linked].append(item.rank)
    shown: set[Hashable] = set()
    for item in counts:
        key = (item.side, item.receive_count, item.send_count, item.linked)
        if key in shown:
            continue
        shown.add(key)
        source = item.side == "source"
        table.add_row(
            Text(item.side),
            Text(short_ranks(alike[key])),
            Text(str(item.receive_count) if source else "-"),
            Text("-" if source else str(item.send_count)),
            Text("yes") if item.linked else Text("no", style="yellow"),
        )
    return table


def findings_of(status: StatusView) -> list[Shown]:
    """Return every finding of a status once: standing ones of worlds and pairs first."""
    shown = [
        Shown(f"world {world.world}", found) for world in status.worlds for found in world.findings
    ]
    shown += [
        Shown(f"pair {pair_name(pair)}", found) for pair in status.pairs for found in pair.findings
    ]
    standing = {item.finding for item in shown}
    shown += [
        Shown(item.about, item.finding, item.times, item.ago_ms)
        for item in reversed(status.refusals)
        if item.finding not in standing
    ]
    return shown


def print_findings(findings: Sequence[Shown], console: Console) -> None:
    """Print each finding as a stanza: code, field, every value with its holder, hint."""
    for item in findings:
        console.print()
        console.print(_headline(item))
        console.print(Padding(_stanza(item.finding), (0, 0, 0, 2)))


def _headline(item: Shown) -> Text:
    found = item.finding
    style = "bold red" if found.is_error else "bold yellow"
    line = Text.assemble((f"{found.code} {found.slug}", style), f"  {item.about}")
    if item.times > 1:
        line.append(f", {item.times} times")
    if item.ago_ms is not None:
        line.append(f", {duration(item.ago_ms)} ago", style="dim")
    return line


def _stanza(found: Finding) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("field", Text(found.field))
    for side in found.sides:
        table.add_row("value", Text.assemble((side.value, "bold"), f"  {side.who}"))
    values = "; ".join(f"{side.who} has {side.value}" for side in found.sides)
    rest = found.message.replace(f"{found.field}: ", "", 1).replace(values, "", 1)
    reason = " ".join(rest.split()).strip(" :")
    if reason:
        table.add_row("reason", Text(reason))
    if found.hint:
        table.add_row("hint", Text(found.hint))
    return table


def pair_name(pair: PairView) -> str:
    """Return ``source → destination``."""
    return f"{pair.source} → {pair.destination}"


def transfers_sentence(transfers: dict[str, int]) -> str:
    """Return transfers by state, such as ``12 delivered, 4 granted``."""
    return ", ".join(f"{count} {state}" for state, count in transfers.items() if count) or "none"


def short_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as runs, such as ``0-6, 9``; ``-`` for none."""
    ordered = list(ranks)
    return ranks_text(ordered).partition(" ")[2] if ordered else "-"


def duration(milliseconds: int) -> str:
    """Return a time span in the largest unit that tells enough."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds} ms"
    if seconds < 100:  # noqa: PLR2004 - three digits at most
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - binary units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _state(state: str) -> Text:
    style = "green" if state in GOOD else "bold red" if state in BAD else "yellow"
    return Text(state, style=style)


def _table(*columns: str, gap: int = 2) -> Table:
    """Return a table without lines; a name that ends in ``>`` is a column of numbers."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        number = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if number else "left", overflow="fold")
    return table
