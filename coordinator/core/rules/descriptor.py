"""One rank's descriptor against itself: what contradicts itself is refused before any compare."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from rankgate.proto.codes import Code
from rankgate.proto.descriptor import KV_KINDS, PROFILES, ROLES, Descriptor, KvGroup, StateComponent
from rankgate.proto.findings import Finding, Side, finding, world_ranks
from rankgate.proto.geometry import DTYPE_BYTES, LAYOUTS, GeometryError, heads_of_rank, item_len
from rankgate.proto.limits import MAX_WORLD_SIZE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_name(world: str, rank: int) -> Iterator[Finding]:
    """RG101: the world is named, and not by torchrun's default ``none``."""
    if world.lower() == "none" or not _NAME.match(world):
        who = f"rank {rank}"
        yield finding(Code.WORLD_NAME_INVALID, "world", Side(who, repr(world)))


def check_descriptor(descriptor: Descriptor) -> list[Finding]:
    """Return all findings of one descriptor by itself (RG101 to RG118)."""
    return [found for rule in _RULES for found in rule(descriptor)]


def _who(descriptor: Descriptor) -> str:
    return world_ranks(descriptor.role, descriptor.world, [descriptor.rank])


def _name(descriptor: Descriptor) -> Iterator[Finding]:
    yield from check_name(descriptor.world, descriptor.rank)


def _known_values(descriptor: Descriptor) -> Iterator[Finding]:
    """RG117, RG118: role, profile, cache kinds and layouts are ones we know."""
    who = _who(descriptor)
    if descriptor.role not in ROLES:
        yield _unknown(Code.ROLE_INVALID, "role", who, descriptor.role, ROLES)
    if descriptor.profile not in PROFILES:
        yield _unknown(Code.VALUE_INVALID, "profile", who, descriptor.profile, PROFILES)
    for group in descriptor.kv:
        path = f"kv[{group.name}]"
        if group.kind not in KV_KINDS:
            yield _unknown(Code.VALUE_INVALID, f"{path}.kind", who, group.kind, KV_KINDS)
        if group.layout not in LAYOUTS:
            yield _unknown(Code.VALUE_INVALID, f"{path}.layout", who, group.layout, LAYOUTS)


def _unknown(code: Code, field: str, who: str, value: str, known: Iterable[str]) -> Finding:
    return finding(code, field, Side(who, repr(value)), detail=f"(known: {', '.join(known)})")


def _world_size(descriptor: Descriptor) -> Iterator[Finding]:
    """RG102: the world size is the product of the parallel sizes, and the rank is below it."""
    who, sizes = _who(descriptor), descriptor.layout
    if descriptor.world_size != sizes.world_size:
        product = f"pp {sizes.pp} x dp {sizes.dp} x cp {sizes.cp} x tp {sizes.tp}"
        yield finding(
            Code.WORLD_SIZE_INVALID,
            "world_size",
            Side(who, str(descriptor.world_size)),
            Side("its layout", f"{sizes.world_size} ({product})"),
        )
    if descriptor.world_size > MAX_WORLD_SIZE:
        detail = f"(at most {MAX_WORLD_SIZE})"
        size = Side(who, str(descriptor.world_size))
        yield finding(Code.WORLD_SIZE_INVALID, "world_size", size, detail=detail)
    if descriptor.rank >= descriptor.world_size:
        detail = f"(world_size {descriptor.world_size} allows 0 to {descriptor.world_size - 1})"
        yield finding(
            Code.WORLD_SIZE_INVALID, "rank", Side(who, str(descriptor.rank)), detail=detail
        )


def _coordinates(descriptor: Descriptor) -> Iterator[Finding]:
    """RG103: every coordinate is below its size, and dcp lies inside tp."""
    who, at, sizes = _who(descriptor), descriptor.coordinates, descriptor.layout
    for axis in ("pp", "dp", "cp", "tp", "dcp"):
        place, size = getattr(at, axis), getattr(sizes, axis)
        if place >= size:
            detail = f"(layout.{axis} is {size})"
            side = Side(who, str(place))
            yield finding(Code.COORDINATE_INVALID, f"coordinates.{axis}", side, detail=detail)
    if sizes.tp % sizes.dcp:
        detail = f"(does not divide layout.tp {sizes.tp})"
        yield finding(
            Code.COORDINATE_INVALID, "layout.dcp", Side(who, str(sizes.dcp)), detail=detail
        )


def _unique_tags(descriptor: Descriptor) -> Iterator[Finding]:
    """RG115: a KV group name and a state kind stand once in a descriptor."""
    tagged = [("kv", group.name) for group in descriptor.kv]
    tagged += [("state", component.kind) for component in descriptor.state]
    for (path, tag), times in Counter(tagged).items():
        if times > 1:
            side = Side(_who(descriptor), f"{times} of them")
            yield finding(Code.DUPLICATE_COMPONENT, f"{path}[{tag}]", side)


def _kv_groups(descriptor: Descriptor) -> Iterator[Finding]:
    for group in descriptor.kv:
        path, who = f"kv[{group.name}]", _who(descriptor)
        yield from _layers(path, who, group.layers)
        if group.dtype not in DTYPE_BYTES:
            yield finding(Code.DTYPE_UNKNOWN, f"{path}.dtype", Side(who, repr(group.dtype)))
            continue
        yield from _heads(path, who, group, descriptor)
        yield from _item_lens(path, who, group)


def _layers(path: str, who: str, layers: list[int]) -> Iterator[Finding]:
    """RG113: a component lists its layers, each once."""
    if not layers:
        yield finding(Code.LAYER_IDS_INVALID, f"{path}.layers", Side(who, "an empty list"))
    repeated = [layer for layer, times in Counter(layers).items() if times > 1][:8]
    if repeated:
        side = Side(who, f"{repeated} more than once")
        yield finding(Code.LAYER_IDS_INVALID, f"{path}.layers", side)


def _heads(path: str, who: str, group: KvGroup, descriptor: Descriptor) -> Iterator[Finding]:
    """RG110, RG111: heads can be sharded over tp, and the local count follows (cases A06, A09)."""
    tp_size, tp_rank = descriptor.layout.tp, descriptor.coordinates.tp
    if tp_rank >= tp_size:
        return  # said by RG103
    if group.kind == "mla" and (group.total_heads, group.local_heads) != (1, 1):
        side = Side(who, f"total_heads {group.total_heads}, local_heads {group.local_heads}")
        detail = "(a latent is one replicated head: 1 and 1)"
        yield finding(Code.HEADS_INCONSISTENT, f"{path}.total_heads", side, detail=detail)
        return
    try:
        expected = heads_of_rank(group.total_heads, tp_size, tp_rank).size
    except GeometryError:
        side = Side(who, f"total_heads {group.total_heads} over tp_size {tp_size}")
        yield finding(Code.HEADS_INVALID, f"{path}.total_heads", side)
        return
    if group.local_heads != expected:
        yield finding(
            Code.HEADS_INCONSISTENT,
            f"{path}.local_heads",
            Side(who, str(group.local_heads)),
            Side("derived", f"{expected} (total_heads {group.total_heads} over tp {tp_size})"),
        )


def _item_lens(path: str, who: str, group: KvGroup) -> Iterator[Finding]:
    """RG112: declared bytes per page are page_size x heads x dim x element size."""
    for part, dim, declared in (
        ("k", group.head_dim, group.k_item_len),
        ("v", group.v_head_dim, group.v_item_len),
    ):
        derived = item_len(group.page_size, group.local_heads, dim, group.dtype)
        if declared != derived:
            sizes = f"{group.page_size} x {group.local_heads} x {dim} x {group.dtype}"
            yield finding(
                Code.ITEM_LEN_INCONSISTENT,
                f"{path}.{part}_item_len",
                Side(who, f"{declared} bytes"),
                Side("derived", f"{derived} bytes ({sizes})"),
            )


def _states(descriptor: Descriptor) -> Iterator[Finding]:
    for component in descriptor.state:
        path, who = f"state[{component.kind}]", _who(descriptor)
        yield from _layers(path, who, component.layers)
        if component.dtype not in DTYPE_BYTES:
            yield finding(Code.DTYPE_UNKNOWN, f"{path}.dtype", Side(who, repr(component.dtype)))
        yield from _state_lengths(path, who, component)


def _state_lengths(path: str, who: str, component: StateComponent) -> Iterator[Finding]:
    """RG114: one item length per layer (case A34)."""
    if len(component.item_lens) != len(component.layers):
        side = Side(who, f"{len(component.item_lens)} for {len(component.layers)} layers")
        yield finding(Code.LENGTHS_DIFFER, f"{path}.item_lens", side)


_RULES: tuple[Callable[[Descriptor], Iterator[Finding]], ...] = (
    _name,
    _known_values,
    _world_size,
    _coordinates,
    _unique_tags,
    _kv_groups,
    _states,
)
