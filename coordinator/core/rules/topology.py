"""Parallel layouts and profiles of a pair (RG6xx), and its transports (RG8xx)."""

from __future__ import annotations

from collections.abc import Iterator

from rankgate.coordinator.core.verdicts import Ruling, Stand, WorldShape
from rankgate.proto.codes import Code

P_TP_GT_D_TP = "p_tp_gt_d_tp"
"""Capability: replicated source heads may outnumber the destination's ranks (vLLM asserts that)."""


def check_topology(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """Yield what stands between the layouts of two shapes."""
    yield from _profile(source, destination)
    yield from _unplanned(source, destination)
    yield from _divides(source, destination)
    yield from _replicated(source, destination)
    yield from _transport(source, destination)


def _both(
    source: WorldShape, destination: WorldShape, first: str, second: str
) -> tuple[Stand, Stand]:
    return (
        Stand("source", tuple(range(len(source.ranks))), first),
        Stand("destination", tuple(range(len(destination.ranks))), second),
    )


def _profile(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG612: both sides must expect the same contacts."""
    if source.profile != destination.profile:
        stands = _both(source, destination, source.profile, destination.profile)
        yield Ruling(Code.PROFILE_MISMATCH, "profile", stands)


def _unplanned(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG613: cp and dcp are not planned yet, nor the engines' habits beyond tp."""
    engine = source.profile != "native"
    axes = ("pp", "dp", "cp", "dcp") if engine else ("cp", "dcp")
    for axis in axes:
        sizes = [getattr(shape.layout, axis) for shape in (source, destination)]
        if max(sizes) > 1:
            stands = _both(source, destination, str(sizes[0]), str(sizes[1]))
            detail = f"({source.profile} profile)"
            yield Ruling(Code.PARALLELISM_UNSUPPORTED, f"layout.{axis}", stands, detail)
    kinds = {
        group.kind for shape in (source, destination) for rank in shape.ranks for group in rank.kv
    }
    if engine and "mla" in kinds:
        stands = _both(source, destination, "mla", "mla")
        detail = f"({source.profile} profile plans gqa only)"
        yield Ruling(Code.PARALLELISM_UNSUPPORTED, "kv.kind", stands, detail)


def _divides(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG610: SGLang and vLLM round where sizes do not divide; native plans them exactly."""
    sizes = sorted((source.layout.tp, destination.layout.tp))
    if source.profile != "native" and sizes[1] % sizes[0]:
        stands = _both(source, destination, str(source.layout.tp), str(destination.layout.tp))
        detail = f"({source.profile} profile)"
        yield Ruling(Code.SIZES_DO_NOT_DIVIDE, "layout.tp", stands, detail)


def _replicated(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG611: vLLM asserts when P_TP > D_TP while KV heads are replicated on the source."""
    if source.profile != "vllm" or source.layout.tp <= destination.layout.tp:
        return
    if all(P_TP_GT_D_TP in shape.capabilities for shape in (source, destination)):
        return
    for name in source.group_names():
        heads = source.holders(name)[0][1].total_heads
        if source.layout.tp > heads:
            first = f"tp {source.layout.tp} over {heads} KV heads"
            stands = _both(source, destination, first, f"tp {destination.layout.tp}")
            yield Ruling(Code.REPLICATED_SOURCE_UNSUPPORTED, f"kv[{name}].total_heads", stands)


def _transport(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG810: both sides move tensors the same way."""
    if source.transport != destination.transport:
        stands = _both(source, destination, source.transport, destination.transport)
        yield Ruling(Code.TRANSPORT_MISMATCH, "transport.kind", stands)
