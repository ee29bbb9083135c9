"""Links of one rank, per pair of epochs: who dials whom, what is compared, when all stands.

Destinations dial their sources. Both compare the peer's metadata with the digest that the daemon
validated, and the plan with the registered lengths, before a rank calls itself linked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from rankgate.proto.codec import WireError, decode_blob
from rankgate.proto.codes import Code
from rankgate.proto.digests import digest_bytes
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.geometry import checked_end
from rankgate.proto.messages import Metadata, Peer, PeerHello, Slice, Verdict

Epochs = tuple[int, int]

LINK_MS = 10_000
"""How long the links of a pair may take before the rank reports that they failed."""

LINGER_MS = 2000
"""How long the links of a broken pair stand after its last request, for its last words."""

DATA = "data"


class LinkState(StrEnum):
    """Where one pair of epochs stands for this rank."""

    LINKING = "linking"
    LINKED = "linked"
    READY = "ready"
    REJECTED = "rejected"


class PeerLink:
    """One contact of this rank: a peer process, and whether it has answered or dialed."""

    __slots__ = ("kind", "lengths", "peer", "slices", "up")

    def __init__(self, peer: Peer, kind: str, slices: list[Slice]) -> None:
        """Begin without a link."""
        self.peer = peer
        self.kind = kind
        self.slices = slices
        self.up = False
        self.lengths: dict[tuple[str, str], list[int]] = {}

    @property
    def is_data(self) -> bool:
        """Whether bytes move over it."""
        return self.kind == DATA


class PairLinks:
    """This rank's side of one accepted or rejected pair.

    Invariant: ``links`` holds each peer rank once, for all data-parallel groups of the other
    world; counts and key are those of the verdict and never change within its epochs.
    """

    def __init__(self, verdict: Verdict, *, sending: bool, now: int) -> None:
        """Take a verdict."""
        self.verdict = verdict
        self.epochs: Epochs = (verdict.source_epoch, verdict.destination_epoch)
        self.sending = sending
        self.state = LinkState.LINKING if verdict.accepted else LinkState.REJECTED
        self.until = now + LINK_MS
        self.broken = False
        """Whether a side's seal is gone: these epochs never come back."""
        self.findings = list(verdict.findings)
        kinds = {contact.slot: contact for contact in verdict.contacts}
        self.links: dict[int, PeerLink] = {
            peer.rank: PeerLink(peer, kinds[peer.slot].kind, kinds[peer.slot].slices)
            for peer in verdict.peers
            if peer.slot in kinds
        }

    @property
    def other(self) -> str:
        """Name of the other world."""
        return self.verdict.destination if self.sending else self.verdict.source

    @property
    def complete(self) -> bool:
        """Whether every contact is linked."""
        return all(link.up for link in self.links.values())

    def in_group(self, dp: int) -> dict[int, PeerLink]:
        """Return the contacts in one data-parallel group of the other world, by rank."""
        return {rank: link for rank, link in self.links.items() if link.peer.dp == dp}


class Registered(Struct, frozen=True):
    """What this rank registered: its metadata blob and region lengths by (group, part)."""

    blob: bytes
    lengths: Mapping[tuple[str, str], list[int]]
    item_lens: Mapping[tuple[str, str], int]


def region_lengths(metadata: Metadata) -> dict[tuple[str, str], list[int]]:
    """Return region lengths in bytes by (group, part), in layer order."""
    found: dict[tuple[str, str], list[int]] = {}
    for region in sorted(metadata.regions, key=lambda region: region.layer):
        found.setdefault((region.group, region.part), []).append(region.length)
    return found


def check_metadata(blob: bytes, link: PeerLink, who: str) -> Finding | None:
    """Compare a peer's metadata with what the daemon validated, and keep its lengths (RG812)."""
    digest = digest_bytes(blob)
    if digest != link.peer.metadata_digest:
        sides = (
            Side(who, digest.hex()),
            Side("the daemon validated", link.peer.metadata_digest.hex()),
        )
        return finding(Code.METADATA_MISMATCH, "metadata", *sides)
    try:
        metadata: Metadata = decode_blob(blob, Metadata)
    except WireError as error:
        return finding(Code.METADATA_MISMATCH, "metadata", Side(who, str(error)))
    link.lengths = region_lengths(metadata)
    return None


def check_slices(slices: Iterable[Slice], ours: Registered, *, sending: bool) -> Finding | None:
    """Check that no slice of the plan leaves this rank's registered memory (RG812).

    Offsets are within a page, so a slice is inside if its end is within one item length; and a
    buffer must hold at least one page of it.
    """
    for part in slices:
        key = (part.group, part.part)
        first = part.source_layer if sending else part.destination_layer
        offset = part.source_offset if sending else part.destination_offset
        stride = part.source_stride if sending else part.destination_stride
        end = checked_end(offset, (part.count - 1) * stride + part.length)
        lengths, item = ours.lengths.get(key, []), ours.item_lens.get(key, 0)
        if end > item or first + part.layers > len(lengths):
            return finding(
                Code.METADATA_MISMATCH,
                f"plan {part.group}.{part.part}",
                Side("the plan", f"layers {first}+{part.layers}, bytes to {end} of a page"),
                Side("registered", f"{len(lengths)} layers, {item} bytes a page"),
            )
    return None


def check_hello(pair: PairLinks, hello: PeerHello, me: tuple[int, bytes]) -> Finding | None:
    """Check that a dialing destination means this process and stands in the verdict (C07)."""
    rank, incarnation = me
    if (hello.source_rank, hello.source_incarnation) != (rank, incarnation):
        expected = f"rank {hello.source_rank} process {hello.source_incarnation.hex()[:8]}"
        return finding(
            Code.IDENTITY_MISMATCH,
            "source",
            Side(f"{hello.world} rank {hello.rank} expects", expected),
            Side("answering", f"rank {rank} process {incarnation.hex()[:8]}"),
        )
    link = pair.links.get(hello.rank)
    if link is None or link.peer.incarnation != hello.incarnation:
        known = link.peer.incarnation.hex()[:8] if link else "no such contact"
        return finding(
            Code.IDENTITY_MISMATCH,
            "destination",
            Side(f"{hello.world} rank {hello.rank}", hello.incarnation.hex()[:8]),
            Side("the verdict", known),
        )
    if hello.table_digest != pair.verdict.table_digest:
        sides = (
            Side(f"{hello.world} rank {hello.rank}", hello.table_digest.hex()),
            Side("this rank", pair.verdict.table_digest.hex()),
        )
        return finding(Code.METADATA_MISMATCH, "table_digest", *sides)
    return None


def link_failure(pair: PairLinks) -> Finding:
    """Return the finding that some contacts could not be linked in time (RG813)."""
    down = [link.peer for link in pair.links.values() if not link.up]
    sides = [
        Side(f"{pair.other} rank {peer.rank} on {peer.host}", f"no answer at {peer.address}")
        for peer in down[:8]
    ]
    return finding(Code.LINK_FAILED, "links", *sides, detail=f"({len(down)} of {len(pair.links)})")
