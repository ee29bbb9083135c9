"""Bounded memory of why things are as they are: stories per subject, and refusals."""

from __future__ import annotations

from collections import OrderedDict, deque

from rankgate.proto.findings import Finding

_STORY_LINES = 64
_STORY_SUBJECTS = 4096


class Refused:
    """One refusal, and how often it was given."""

    __slots__ = ("about", "finding", "last", "times")

    def __init__(self, about: str, finding: Finding, now: int) -> None:
        """Note the first time."""
        self.about = about
        self.finding = finding
        self.times = 1
        self.last = now


class Journal:
    """Stories and refusals for operators.

    Invariant: never more than 4096 subjects of 64 lines each, nor ``max_refusals`` refusals; the
    oldest go first.
    """

    def __init__(self, max_refusals: int) -> None:
        """Start empty."""
        self._stories: OrderedDict[str, deque[tuple[int, str]]] = OrderedDict()
        self._refused: OrderedDict[tuple[str, str, str], Refused] = OrderedDict()
        self._max_refusals = max_refusals

    def record(self, subject: str, now: int, line: str) -> None:
        """Add one line to a subject's story."""
        story = self._stories.get(subject)
        if story is None:
            story = self._stories[subject] = deque(maxlen=_STORY_LINES)
            if len(self._stories) > _STORY_SUBJECTS:
                self._stories.popitem(last=False)
        self._stories.move_to_end(subject)
        story.append((now, line))

    def story(self, subject: str) -> list[tuple[int, str]]:
        """Return a subject's lines with their times in ms, oldest first."""
        return list(self._stories.get(subject, ()))

    def refuse(self, about: str, finding: Finding, now: int) -> None:
        """Count a refusal; equal ones about the same thing are one entry."""
        key = (about, finding.code, finding.message)
        seen = self._refused.pop(key, None)
        if seen is None:
            seen = Refused(about, finding, now)
        else:
            seen.times += 1
            seen.last = now
        self._refused[key] = seen
        if len(self._refused) > self._max_refusals:
            self._refused.popitem(last=False)

    def refusals(self) -> list[Refused]:
        """Return all refusals, the latest last."""
        return list(self._refused.values())
