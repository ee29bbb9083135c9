"""The operator's client and commands, against a small fake daemon."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import zmq
from click.testing import CliRunner, Result
from msgspec import Struct

from rankgate.coordinator.cli import status
from rankgate.coordinator.cli.client import (
    DaemonUnreachableError,
    OperatorClient,
    QueryRefusedError,
)
from rankgate.proto.codec import decode, encode
from rankgate.proto.messages import Query, Refusal, Rejected
from rankgate.proto.views import View

Answer = Callable[[Query, int], list[list[bytes]]]


class FakeDaemon:
    """Answers every question by a function, until it is stopped."""

    def __init__(self, endpoint: str, answer: Answer) -> None:
        """Bind and serve in a thread."""
        self.endpoint = endpoint
        self.answer = answer
        self.asked: list[Query] = []
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(endpoint)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while stop not in dict(poller.poll()):
            peer, *frames = self._router.recv_multipart()
            header, query = decode(frames)
            assert isinstance(query, Query)
            self.asked.append(query)
            for reply in self.answer(query, header.id):
                self._router.send_multipart([peer, *reply])
        stop.close(linger=0)

    def close(self) -> None:
        """Stop serving."""
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)
        self._router.close(linger=0)
        self._context.term()


@pytest.fixture
def daemon(tmp_path: Path, views: SimpleNamespace) -> Iterator[FakeDaemon]:
    """A healthy fake daemon."""

    def answer(query: Query, number: int) -> list[list[bytes]]:
        worlds = [views.world("prefill"), views.world("decode")]
        known = {
            "status": View(status=views.status(worlds, [views.pair()])),
            "ranks": View(ranks=[views.rank(0)]),
            "pairs": View(pairs=[views.pair()]),
            "transfers": View(transfers=[]),
        }
        return [encode(known[query.view], number)]

    fake = FakeDaemon(f"ipc://{tmp_path}/op", answer)
    yield fake
    fake.close()


def always(message: Struct) -> Answer:
    """Return an answer that is the same to every question."""
    return lambda _query, number: [encode(message, number)]


def run(command: click.Command, *arguments: str) -> Result:
    """Return what a command did."""
    return CliRunner().invoke(command, list(arguments))


def test_client_returns_the_view(daemon: FakeDaemon) -> None:
    """A question brings the view that was asked for, again and again."""
    with OperatorClient(daemon.endpoint) as client:
        found = client.ask("status").status
        assert found is not None
        assert [world.world for world in found.worlds] == ["prefill", "decode"]
        assert client.ask("transfers").transfers == []
    assert [query.view for query in daemon.asked] == ["status", "transfers"]


def test_client_passes_over_answers_to_older_questions(daemon: FakeDaemon) -> None:
    """A late answer is not taken for the newest one."""
    daemon.answer = lambda _query, number: [
        encode(View(ranks=[]), number + 77),
        encode(View(transfers=[]), number),
    ]
    with OperatorClient(daemon.endpoint) as client:
        view = client.ask("transfers")
    assert view.ranks is None
    assert view.transfers == []


def test_client_raises_what_the_daemon_refuses(daemon: FakeDaemon, views: SimpleNamespace) -> None:
    """A view with a finding, a rejection and a kind 0 refusal are one error, in words."""
    answers = [
        View(finding=views.wrong_count),
        Rejected(findings=[views.wrong_count]),
        Refusal(code="RG201", text="wire_version: too new", min=2, max=3),
    ]
    with OperatorClient(daemon.endpoint) as client:
        for message, words in zip(answers, ("RG601", "RG601", "wire versions 2 to 3"), strict=True):
            daemon.answer = always(message)
            with pytest.raises(QueryRefusedError, match=words):
                client.ask("status")


def test_client_raises_on_garbage(daemon: FakeDaemon) -> None:
    """An unreadable answer is an error with the endpoint, not a crash."""
    daemon.answer = lambda _query, _number: [[b"HTTP/1.1 400", b""]]
    with (
        OperatorClient(daemon.endpoint) as client,
        pytest.raises(QueryRefusedError, match="unreadable"),
    ):
        client.ask("status")


def test_client_gives_up_after_its_timeout(daemon: FakeDaemon) -> None:
    """A daemon that does not answer is unreachable; the endpoint and the next step are named."""
    daemon.answer = lambda _query, _number: []
    with (
        OperatorClient(daemon.endpoint) as client,
        pytest.raises(DaemonUnreachableError, match=r"no answer within 0\.05 s.*rankgate serve"),
    ):
        client.ask("status", timeout=0.05)


def test_client_refuses_a_senseless_endpoint() -> None:
    """An endpoint that ZeroMQ does not know is told with the expected form."""
    with pytest.raises(DaemonUnreachableError, match="expected ipc://PATH or tcp://HOST:PORT"):
        OperatorClient("nonsense")


@pytest.mark.parametrize("command", ["status", "ranks", "pairs", "transfers"])
def test_commands_exit_4_when_no_daemon_is_there(command: str, tmp_path: Path) -> None:
    """An unreachable daemon is exit code 4, words on stderr, nothing on stdout."""
    done = run(getattr(status, command), "--operator", f"ipc://{tmp_path}/none")
    assert done.exit_code == 4
    assert done.stdout == ""
    assert f"{tmp_path}/none does not exist" in done.stderr


def test_commands_exit_1_when_the_daemon_refuses(
    daemon: FakeDaemon, views: SimpleNamespace
) -> None:
    """A refused question is the answer no."""
    daemon.answer = lambda _query, number: [encode(View(finding=views.wrong_count), number)]
    done = run(status.ranks, "--operator", daemon.endpoint)
    assert done.exit_code == 1
    assert "RG601" in done.stderr


@pytest.mark.parametrize("command", ["status", "ranks", "pairs", "transfers"])
def test_json_is_one_document_with_its_schema(command: str, daemon: FakeDaemon) -> None:
    """`-o json` prints the view under its name, and the schema's version."""
    done = run(getattr(status, command), "--operator", daemon.endpoint, "-o", "json")
    assert done.exit_code == 0
    assert set(json.loads(done.stdout)) == {"schema", command}


def test_endpoint_comes_from_the_environment(daemon: FakeDaemon) -> None:
    """RANKGATE_OPERATOR names the daemon when no flag does."""
    done = CliRunner().invoke(status.pairs, [], env={"RANKGATE_OPERATOR": daemon.endpoint})
    assert done.exit_code == 0
    assert "prefill → decode" in done.stdout


def test_check_of_a_healthy_daemon_is_exit_0(daemon: FakeDaemon) -> None:
    """`status --check` prints one sentence."""
    done = run(status.status, "--check", "--operator", daemon.endpoint)
    assert done.exit_code == 0
    assert done.stdout == "healthy: 2 of 2 worlds sealed, 1 of 1 pairs ready\n"


@pytest.mark.parametrize("output", ["table", "json"])
def test_check_of_an_unhealthy_daemon_is_exit_1(
    output: str, daemon: FakeDaemon, views: SimpleNamespace
) -> None:
    """`status --check` exits 1 and still says why, in either form."""
    refused = views.status(pairs=[views.pair("rejected", (views.wrong_count,))], healthy=False)
    daemon.answer = lambda _query, number: [encode(View(status=refused), number)]
    done = run(status.status, "--check", "-o", output, "--operator", daemon.endpoint)
    assert done.exit_code == 1
    assert "receive_count_mismatch" in done.stdout


def test_without_check_an_unhealthy_daemon_is_exit_0(
    daemon: FakeDaemon, views: SimpleNamespace
) -> None:
    """Plain `status` answers the question, whatever the answer."""
    daemon.answer = lambda _query, number: [
        encode(View(status=views.status(healthy=False)), number)
    ]
    assert run(status.status, "--operator", daemon.endpoint).exit_code == 0


def test_an_unknown_output_is_a_usage_error() -> None:
    """Usage errors are exit code 2."""
    assert run(status.ranks, "-o", "yaml").exit_code == 2


def test_client_joins_the_pages_of_a_long_list(daemon: FakeDaemon, views: SimpleNamespace) -> None:
    """Whoever asks for ranks gets all of them, however many answers that takes."""
    daemon.answer = lambda query, number: [
        encode(View(ranks=[views.rank(query.offset)], next=(query.offset + 1) % 3), number)
    ]
    with OperatorClient(daemon.endpoint) as client:
        view = client.ask("ranks")
    assert view.ranks is not None
    assert [row.rank for row in view.ranks] == [0, 1, 2]
    assert view.next == 0
    assert [query.offset for query in daemon.asked] == [0, 1, 2]
