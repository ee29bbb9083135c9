"""What operators read: everything that matters, at 80 and at 120 columns."""

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from rankgate.coordinator.cli import tables


def render(width: int, show: Callable[..., None], *what: object) -> str:
    """Return what a function prints on a console of this width, without colours."""
    console = Console(file=io.StringIO(), width=width, highlight=False, no_color=True)
    show(*what, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert isinstance(text, str)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    return text


def words(text: str) -> str:
    """Return a text without its line breaks, for sentences that may be wrapped."""
    return " ".join(text.split())


def test_health_of_an_empty_daemon(views: SimpleNamespace) -> None:
    """A daemon that nobody has registered with is healthy, and says so."""
    assert tables.health_sentence(views.status()) == "healthy: no world has registered yet"


def test_health_of_a_ready_pair(views: SimpleNamespace) -> None:
    """All is well in one sentence with the numbers."""
    found = views.status([views.world("prefill"), views.world("decode")], [views.pair()])
    assert tables.health_sentence(found) == "healthy: 2 of 2 worlds sealed, 1 of 1 pairs ready"


@pytest.mark.parametrize("width", [80, 120])
def test_first_line_names_the_missing_rank(views: SimpleNamespace, width: int) -> None:
    """Which rank a forming world waits for stands in the first sentence."""
    forming = views.world(
        "decode", state="forming", have=3, missing=[3], findings=[views.rank_gone]
    )
    text = render(width, tables.print_status, views.status([forming], healthy=False))
    assert words(text).startswith(
        "not healthy: world decode is forming (3 of 4, rank 3 missing): RG104 rank_missing"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_refusal_shows_code_field_values_holders_and_hint(
    views: SimpleNamespace, width: int
) -> None:
    """A refused pair shows all that is needed to find the rank at fault."""
    refused = views.pair("rejected", (views.wrong_count,))
    found = views.status(
        [views.world("prefill"), views.world("decode")],
        [refused],
        [views.refusal(views.wrong_count)],
        healthy=False,
    )
    text = words(render(width, tables.print_status, found))
    assert "pair prefill → decode is rejected: RG601 receive_count_mismatch" in text
    assert "field world_receive_count" in text
    assert "value 2 decode decode rank 3" in text
    assert "value 4 computed from the world sizes" in text
    assert f"hint {views.wrong_count.hint}" in text


def test_a_standing_finding_is_shown_once(views: SimpleNamespace) -> None:
    """What a pair still says is not repeated from the list of refusals."""
    refused = views.pair("rejected", (views.wrong_count,))
    found = views.status(pairs=[refused], refusals=[views.refusal(views.wrong_count)])
    assert [item.about for item in tables.findings_of(found)] == ["pair prefill → decode"]


def test_an_old_refusal_says_how_often_and_when(views: SimpleNamespace) -> None:
    """A refusal that nothing stands for any more is told with its age and number."""
    found = views.status(refusals=[views.refusal(views.rank_gone, "world decode")])
    text = render(80, tables.print_status, found)
    assert "RG104 rank_missing  world decode, 3 times, 1.2 s ago" in text


@pytest.mark.parametrize("width", [80, 120])
def test_sixty_four_ranks_take_one_line_each(views: SimpleNamespace, width: int) -> None:
    """A world of 64 ranks is 64 lines and a header, at either width."""
    ranks = [views.rank(number) for number in range(64)]
    if width == 80:
        ranks = [views.rank(number, coordinates=f"tp{number}") for number in range(64)]
    text = render(width, tables.print_ranks, ranks)
    assert len(text.splitlines()) == 65


def test_equal_counts_share_a_line(views: SimpleNamespace) -> None:
    """Ranks with the same counts are one line; a rank that has not linked has its own."""
    odd = views.pair()
    counts = [item for item in odd.counts if (item.side, item.rank) != ("destination", 3)]
    last = type(counts[0])(side="destination", rank=3, receive_count=0, send_count=1, linked=False)
    text = render(80, tables.print_pairs, [views.pair(counts=[*counts, last])])
    lines = [line.split() for line in text.splitlines()]
    assert ["source", "0-1", "2", "-", "yes"] in lines
    assert ["destination", "0-2", "-", "1", "yes"] in lines
    assert ["destination", "3", "-", "1", "no"] in lines


def test_transfers_say_who_has_not_ended(views: SimpleNamespace) -> None:
    """Open transfers come first, with the ranks that are still to end; each is one line."""
    shown = [
        views.transfer("demo-0badcafe-0001", state="delivered", ended=[0, 1, 2, 3], missing=[]),
        views.transfer("demo-0badcafe-0002", age_ms=99_000),
    ]
    lines = render(80, tables.print_transfers, shown).splitlines()
    assert [line.split()[0][-4:] for line in lines[1:]] == ["0002", "0001"]
    assert "2-3" in lines[1]


def test_only_the_latest_ended_transfers_are_listed(views: SimpleNamespace) -> None:
    """A thousand ended transfers do not hide the open ones."""
    ended = [views.transfer(f"r-{number}", state="delivered") for number in range(1000)]
    lines = render(80, tables.print_transfers, [*ended, views.transfer("open")]).splitlines()
    assert len(lines) == 23
    assert lines[1].startswith("open")
    assert lines[-1] == "and 980 more that have ended; -o json shows all"


@pytest.mark.parametrize(
    ("show", "sentence"),
    [
        (tables.print_ranks, "no rank has registered"),
        (tables.print_pairs, "no pair: two sealed worlds of one transfer group make one"),
        (tables.print_transfers, "no transfer is known"),
    ],
)
def test_nothing_to_show_is_said(show: Callable[..., None], sentence: str) -> None:
    """An empty view is a sentence, not an empty table."""
    assert render(80, show, []).strip() == sentence


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1500, "1.5 s"),
        (100_000, "1 min 40 s"),
        (7_500_000, "2 h 5 min"),
    ],
)
def test_durations(milliseconds: int, text: str) -> None:
    """Time spans are told in the largest unit that says enough."""
    assert tables.duration(milliseconds) == text
