"""From an engine's torch tensors to what a rank registers: geometry taken from the real memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankgate.agents.errors import SettingError
from rankgate.proto.descriptor import (
    Coordinates,
    Descriptor,
    KvGroup,
    Layout,
    Model,
    Software,
    StateComponent,
    Transport,
)
from rankgate.proto.geometry import DTYPE_BYTES, LAYOUTS
from rankgate.proto.messages import Metadata, Region

if TYPE_CHECKING:
    import numpy as np
    import torch

    Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

_SHAPES = {
    "HND": "[pages, heads, page_size, head_dim]",
    "NHD": "[pages, page_size, heads, head_dim]",
}


@dataclass(frozen=True, slots=True)
class KvCache:
    """One KV group of this rank: what is registered of it, and the memory behind it.

    Invariant: ``keys[i]`` and ``values[i]`` hold layer ``group.layers[i]``, and each of their pages
    is one run of ``k_item_len`` (``v_item_len``) bytes.
    """

    group: KvGroup
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...] = ()
    """Empty for a latent (``mla``)."""

    def parts(self) -> Iterator[tuple[str, tuple[torch.Tensor, ...], int]]:
        """Yield (part, tensors in layer order, bytes of one page)."""
        yield "k", self.keys, self.group.k_item_len
        if self.values:
            yield "v", self.values, self.group.v_item_len

    def memory(self) -> dict[str, list[Bytes]]:
        """Return the cache's own bytes by part: one ``[pages, item_len]`` view a layer, no copy.

        Copies through these views run on the calling thread alone and never touch torch's
        thread count.
        """
        return {part: [_bytes_of(one) for one in tensors] for part, tensors, _ in self.parts()}

    def regions(self) -> list[Region]:
        """Return the registered buffers, in layer order, K before V."""
        return [
            Region(group=self.group.name, part=part, layer=layer, length=self.group.pages * size)
            for part, tensors, size in self.parts()
            for layer in range(len(tensors))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    """All that an engine says about one of its ranks; the rest comes from torchrun."""

    role: str
    """``encoder``, ``prefill``, ``decode`` or ``unified``."""
    layout: Layout
    coordinates: Coordinates = field(default_factory=Coordinates)
    kv: Sequence[KvCache] = ()
    state: Sequence[StateComponent] = ()
    model: Model = field(default_factory=Model)
    software: Software = field(default_factory=Software)
    group: str = ""
    """Transfer group; only equal labels pair."""
    profile: str = "native"
    """Whose habits decide which ranks talk: ``native``, ``sglang`` or ``vllm``."""
    capabilities: Sequence[str] = ()
    world: str | None = None
    """The world's name; None takes RANKGATE_WORLD or torchrun's run id."""
    claims: Mapping[str, int] = field(default_factory=dict)
    """Counts that the engine still computes itself, by name; a wrong one refuses the pair."""

    def metadata(self, kind: str = "zmq") -> Metadata:
        """Return the transport metadata whose digest is registered."""
        return Metadata(kind=kind, regions=[one for cache in self.kv for one in cache.regions()])

    def descriptor(
        self, *, world: str, rank: int, world_size: int, transport: Transport
    ) -> Descriptor:
        """Return what is registered of this rank."""
        return Descriptor(
            world=world,
            role=self.role,
            group=self.group,
            rank=rank,
            world_size=world_size,
            coordinates=self.coordinates,
            layout=self.layout,
            software=self.software,
            model=self.model,
            kv=[cache.group for cache in self.kv],
            state=list(self.state),
            transport=transport,
            capabilities=list(self.capabilities),
            profile=self.profile,
        )


def describe_kv(
    name: str,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor] = (),
    *,
    layers: Sequence[int],
    total_heads: int,
    layout: str = "HND",
) -> KvCache:
    """Describe a paged KV cache by its tensors.

    Args:
        name: tag by which the two sides' groups are matched, such as ``full``.
        keys: one tensor a layer, ``HND`` [pages, heads, page_size, head_dim] or ``NHD`` [pages,
            page_size, heads, head_dim]; a latent has one head.
        values: the same for V; none for a latent (``mla``).
        layers: global layer ids in the tensors' order.
        total_heads: KV heads of the model before sharding.
        layout: order of a page's axes.

    Raises:
        SettingError: tensors that differ among each other, are not on the CPU, or whose pages
            are not one run of memory each.
    """
    if layout not in LAYOUTS:
        raise SettingError(f"layout {layout!r} of KV group {name!r} is unknown; known: {LAYOUTS}")
    if not keys or len(keys) != len(layers) or (values and len(values) != len(keys)):
        counts = f"{len(keys)} K tensors, {len(values)} V tensors, {len(layers)} layer ids"
        raise SettingError(f"KV group {name!r} needs one tensor a layer; it has {counts}")
    k_shape, dtype = _common(name, "k", keys, layout)
    v_shape, v_dtype = _common(name, "v", values, layout) if values else ((0, 0, 0, 0), dtype)
    if values and (v_shape[:3], v_dtype) != (k_shape[:3], dtype):
        k_text, v_text = f"{dtype} {list(k_shape)}", f"{v_dtype} {list(v_shape)}"
        raise SettingError(f"K and V of KV group {name!r} do not fit: {k_text} and {v_text}")
    pages, heads, page_size = _axes(k_shape, layout)
    per_dim = page_size * heads * DTYPE_BYTES[dtype]
    group = KvGroup(
        name=name,
        kind="gqa" if values else "mla",
        dtype=dtype,
        layout=layout,
        page_size=page_size,
        pages=pages,
        total_heads=total_heads,
        local_heads=heads,
        head_dim=k_shape[3],
        v_head_dim=v_shape[3],
        layers=list(layers),
        k_item_len=per_dim * k_shape[3],
        v_item_len=per_dim * v_shape[3],
    )
    return KvCache(group, tuple(keys), tuple(values))


def _axes(shape: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Return (pages, heads, page_size)."""
    pages, second, third = shape[:3]
    return (pages, second, third) if layout == "HND" else (pages, third, second)


def _common(
    name: str, part: str, tensors: Sequence[torch.Tensor], layout: str
) -> tuple[tuple[int, ...], str]:
    """Return the one shape and dtype name of all tensors of a part."""
    first = tensors[0]
    shape, dtype = tuple(first.shape), str(first.dtype).removeprefix("torch.")
    for layer, tensor in enumerate(tensors):
        where = f"{part} tensor {layer} of KV group {name!r}"
        if tuple(tensor.shape) != shape or tensor.dtype != first.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise SettingError(f"{where} is {found}; tensor 0 is {first.dtype} {list(shape)}")
        if len(shape) != 4 or 0 in shape:  # noqa: PLR2004 - the axes of a page and the page
            text = f"{where} has shape {list(shape)}; expected {layout} {_SHAPES[layout]}"
            raise SettingError(text)
        if dtype not in DTYPE_BYTES:
            raise SettingError(f"{where} has dtype {dtype}; known: {sorted(DTYPE_BYTES)}")
        if tensor.device.type != "cpu":
            raise SettingError(f"{where} is on {tensor.device}; this transport moves CPU tensors")
        if not tensor[0].is_contiguous() or tensor.stride(0) < tensor[0].numel():
            text = f"shape {list(shape)}, strides {list(tensor.stride())}"
            raise SettingError(f"a page of {where} is not one run of memory ({text})")
    return shape, dtype


def _bytes_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - an array whose type needs numpy
    import torch

    # view() refuses where it would have to copy, so the bytes are the cache's own.
    return tensor.detach().view(tensor.shape[0], -1).view(torch.uint8).numpy()
