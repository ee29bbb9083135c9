"""A finding: one rule's result, in words and in fields."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rankgate.proto.codes import Code
from rankgate.proto.fields import Name, Text
from rankgate.proto.limits import MAX_TEXT

_MOST_SIDES = 8
_LONGEST_SIDE = 200
_LONGEST_DETAIL = 400
_LONGEST_MESSAGE = 2000


class Side(Struct, frozen=True, omit_defaults=True):
    """One value of a finding and who holds it, such as ``prefill p0 ranks 0-6``."""

    who: Text
    value: Text


class Finding(Struct, frozen=True, omit_defaults=True):
    """What one rule found. ``code`` and ``slug`` are stable; ``message`` is for people.

    Invariant: ``message`` contains the field path and every side's value (case F09), and all texts
    fit their fields, whatever the world says of itself: beyond 8 sides it says how many more.
    """

    code: Name
    slug: Name
    severity: Name
    field: Text
    message: Text
    sides: tuple[Side, ...] = ()
    hint: Text = ""
    retryable: bool = False

    @property
    def is_error(self) -> bool:
        """Whether the finding refuses."""
        return self.severity == "error"


def finding(code: Code, field: str, *sides: Side, detail: str = "", hint: str = "") -> Finding:
    """Build a finding of ``code`` about ``field``.

    Args:
        code: the refusal's code.
        field: path of the field, such as ``kv[full].dtype``.
        sides: the values that clash, each with its holder.
        detail: appended to the message when the values alone do not say enough.
        hint: overrides the code's own hint.
    """
    shown = tuple(
        Side(_cut(side.who, _LONGEST_SIDE), _cut(side.value, _LONGEST_SIDE))
        for side in sides[:_MOST_SIDES]
    )
    values = "; ".join(f"{side.who} {_verb(side.who)} {side.value}" for side in shown)
    if len(sides) > len(shown):
        values += f"; and {len(sides) - len(shown)} more"
    field = _cut(field, _LONGEST_SIDE)
    words = " ".join(part for part in (values, _cut(detail, _LONGEST_DETAIL)) if part)
    return Finding(
        code=code.id,
        slug=code.slug,
        severity=code.severity.value,
        field=field,
        message=f"{code.title}: {field}: {words}" if words else f"{code.title}: {field}",
        sides=shown,
        hint=_cut(hint or code.hint, MAX_TEXT),
        retryable=code.retryable,
    )


def clip(found: Finding) -> Finding:
    """Return a peer's finding cut to the length of our own, so that it can be handed on.

    A finding goes into outcomes and verdicts for many ranks; an overlong one would make those
    messages unreadable.
    """
    return Finding(
        code=found.code,
        slug=found.slug,
        severity=found.severity,
        field=_cut(found.field, _LONGEST_SIDE),
        message=_cut(found.message, _LONGEST_MESSAGE),
        sides=tuple(
            Side(_cut(side.who, _LONGEST_SIDE), _cut(side.value, _LONGEST_SIDE))
            for side in found.sides[:_MOST_SIDES]
        ),
        hint=_cut(found.hint, _LONGEST_DETAIL),
        retryable=found.retryable,
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _verb(who: str) -> str:
    return "have" if " ranks " in who else "has"


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether any finding refuses."""
    return any(found.is_error for found in findings)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: ``rank 7``, ``ranks 0-6, 9``."""
    ordered = sorted(set(ranks))
    runs: list[str] = []
    start = 0
    for index, rank in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == rank + 1:
            continue
        first = ordered[start]
        runs.append(str(rank) if first == rank else f"{first}-{rank}")
        start = index + 1
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(runs)}"


def world_ranks(role: str, world: str, ranks: Iterable[int]) -> str:
    """Return a holder's name, such as ``decode d0 ranks 0-3``, without saying a word twice."""
    name = world if role == world else f"{role} {world}"
    return f"{name} {ranks_text(ranks)}"
