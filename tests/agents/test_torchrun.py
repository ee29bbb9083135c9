"""A rank's place from torchrun's environment, and the round token over its store."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.errors import SettingError
from rankgate.agents.torchrun import Place, agree, connect_store, read_environment, share_round
from tests.coordinator.core.harness import id16

ENV = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "job",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANKGATE_DAEMON": "ipc:///run/x",
}


class FakeStore:
    """A store in memory; like torch's, it outlives restarts."""

    def __init__(self) -> None:
        """Start empty."""
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a key's value."""
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return all(key in self.values for key in keys)


def place(rank: int, size: int) -> Place:
    """Return a rank's place."""
    return Place(
        world="job", rank=rank, world_size=size, daemon="ipc:///x", master=None, round=None
    )


class Start:
    """One start of all ranks, each a step at a time, in any order."""

    def __init__(self, store: FakeStore, size: int, life: str) -> None:
        """Begin with nobody having done anything."""
        self.size, self.life = size, life
        self.tokens: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self._gates = {rank: threading.Semaphore(0) for rank in range(size)}
        self._done = threading.Semaphore(0)
        self._over = False
        self._store = store
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int) -> None:
        self._gates[rank].acquire()
        try:
            self.tokens[rank] = agree(
                self._store,
                place(rank, self.size),
                id16(self.life, rank),
                new_token=lambda: id16("token", self.life),
                pause=lambda: self._pause(rank),
            )
        except SettingError as error:
            self.errors[rank] = str(error)
        self._done.release()

    def _pause(self, rank: int) -> bool:
        self._done.release()
        self._gates[rank].acquire()
        return not self._over

    def step(self, rank: int) -> None:
        """Let a rank go on until it pauses or is done."""
        if rank not in self.tokens and rank not in self.errors:
            self._gates[rank].release()
            self._done.acquire()

    def end(self) -> None:
        """Say that time is up to whoever still waits."""
        self._over = True
        for rank in range(self.size):
            self.step(rank)


@given(
    size=st.integers(2, 4),
    first=st.lists(st.integers(0, 3), max_size=30),
    second=st.lists(st.integers(0, 3), max_size=30),
)
def test_ranks_of_one_start_take_one_token_and_never_an_older_starts(
    size: int, first: list[int], second: list[int]
) -> None:
    """An earlier start, cut short anywhere, leaves keys behind; no rank ever takes its token."""
    store = FakeStore()
    old = Start(store, size, "old")
    for rank in first:
        old.step(rank % size)
    new = Start(store, size, "new")
    for rank in second:
        new.step(rank % size)
    for _ in range(3):
        for rank in range(size):
            new.step(rank)
    assert set(new.tokens.values()) == {id16("token", "new")}
    assert len(new.tokens) == size
    assert set(old.tokens.values()) <= {id16("token", "old")}
    old.end()


def test_ranks_that_do_not_come_are_named() -> None:
    """Rank 0 waits in vain for 1 and 3; rank 2 for the record."""
    start = Start(FakeStore(), 4, "r")
    start.step(0)
    start.step(2)
    start._over = True
    start.step(0)
    start.step(2)
    for rank in (0, 2):
        assert "ranks 1, 3 said nothing" in start.errors[rank]


def test_a_rank_that_does_not_take_the_token_is_named() -> None:
    """All have written, rank 1 has died since: rank 0 says whom it waited for."""
    start = Start(FakeStore(), 3, "r")
    for rank in (1, 2, 0, 2):
        start.step(rank)
    start._over = True
    start.step(0)
    assert "rank 1 said nothing" in start.errors[0]


def test_a_token_in_the_environment_is_taken_as_it_is() -> None:
    """RANKGATE_ROUND needs no store."""
    given_place = read_environment({**ENV, "RANKGATE_ROUND": "ab" * 16})
    assert share_round(given_place, id16("me"), 1.0) == bytes.fromhex("ab" * 16)


def test_without_a_store_the_error_says_what_to_set() -> None:
    """MASTER_ADDR or RANKGATE_ROUND."""
    with pytest.raises(SettingError, match="RANKGATE_ROUND"):
        share_round(place(0, 2), id16("me"), 1.0)


def test_a_real_store_carries_the_token() -> None:
    """Two ranks over torch's own TCPStore, as under torchrun."""
    server = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    tokens: dict[int, bytes] = {}

    def run(rank: int) -> None:
        there = Place(
            world="job",
            rank=rank,
            world_size=2,
            daemon="ipc:///x",
            master=("127.0.0.1", server.port),
            round=None,
        )
        tokens[rank] = share_round(there, id16("real", rank), 20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]


def test_a_store_that_does_not_answer_is_named() -> None:
    """The address stands in the error."""
    with pytest.raises(SettingError, match=r"127\.0\.0\.1:1 "):
        connect_store(("127.0.0.1", 1), 0.2)


def test_the_environment_gives_the_place() -> None:
    """An explicit name goes over RANKGATE_WORLD, which goes over the run id."""
    found = read_environment(ENV)
    assert (found.world, found.rank, found.world_size) == ("job", 1, 4)
    assert (found.daemon, found.master) == ("ipc:///run/x", ("127.0.0.1", 29500))
    named = {**ENV, "RANKGATE_WORLD": "other"}
    assert read_environment(named).world == "other"
    assert read_environment(named, world="mine", daemon="tcp://h:1").world == "mine"
    assert read_environment(ENV, daemon="tcp://h:1").daemon == "tcp://h:1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "--rdzv-id"),
        ({"TORCHELASTIC_RUN_ID": ""}, "RANKGATE_WORLD"),
        ({"RANKGATE_WORLD": "x" * 65}, "longer than 64"),
        ({"RANK": ""}, "torchrun"),
        ({"RANK": "4"}, "not below"),
        ({"RANKGATE_DAEMON": ""}, "RANKGATE_DAEMON"),
        ({"RANKGATE_ROUND": "xyz"}, "32 hex digits"),
        ({"RANKGATE_ROUND": "abcd"}, "32 hex digits"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_with_what_to_do(
    changes: dict[str, str], words: str
) -> None:
    """torchrun's default run id 'none' is shared by every job without one."""
    with pytest.raises(SettingError, match=words):
        read_environment({**ENV, **changes})


def test_every_order_of_two_ranks_ends_alike() -> None:
    """All interleavings of a few steps."""
    for order in itertools.product((0, 1), repeat=5):
        start = Start(FakeStore(), 2, "r")
        for rank in (*order, 0, 1, 0, 1, 0):
            start.step(rank)
        assert set(start.tokens.values()) == {id16("token", "r")}
        assert len(start.tokens) == 2
