"""The commands status, ranks, pairs and transfers: what the daemon knows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click
import msgspec

from rankgate.proto.views import View

EXIT_YES = 0
EXIT_NO = 1
EXIT_UNREACHABLE = 4

Command = TypeVar("Command", bound=Callable[..., Any])


def _operator_options(command: Command) -> Command:
    """Add the options that every question to the daemon has."""
    for option in (
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=5.0,
            show_default=True,
            help="Seconds to wait for the daemon's answer.",
        ),
        click.option(
            "-o",
            "--output",
            type=click.Choice(["table", "json"]),
            default="table",
            show_default=True,
            help="What to print.",
        ),
        click.option(
            "--operator",
            metavar="ENDPOINT",
            envvar="RANKGATE_OPERATOR",
            help="The daemon's operator socket, such as ipc:///run/rankgate/operator.sock."
            "  [env: RANKGATE_OPERATOR]",
        ),
    ):
        command = option(command)
    return command


@click.command()
@_operator_options
@click.option(
    "--check", is_flag=True, help="Print the first line only and exit 1 when it is not healthy."
)
def status(operator: str | None, output: str, timeout: float, *, check: bool) -> None:
    """Show health, worlds, pairs, transfers and the last refusals."""
    from rankgate.coordinator.cli import tables

    view = ask("status", operator, timeout)
    found = view.status
    if found is None:
        _fail("the daemon's answer holds no status; it is of another version", EXIT_NO)
    if output == "json":
        click.echo(document(view))
    elif check:
        click.echo(tables.health_sentence(found))
    else:
        tables.print_status(found)
    sys.exit(EXIT_NO if check and not found.healthy else EXIT_YES)


@click.command()
@_operator_options
def ranks(operator: str | None, output: str, timeout: float) -> None:
    """Show every rank: its state, coordinates, and what it has staged and landing."""
    from rankgate.coordinator.cli import tables

    view = ask("ranks", operator, timeout)
    if output == "json":
        click.echo(document(view))
    else:
        tables.print_ranks(view.ranks or [])


@click.command()
@_operator_options
def pairs(operator: str | None, output: str, timeout: float) -> None:
    """Show every pair of worlds: verdict, findings, and the counts of its ranks."""
    from rankgate.coordinator.cli import tables

    view = ask("pairs", operator, timeout)
    if output == "json":
        click.echo(document(view))
    else:
        tables.print_pairs(view.pairs or [])


@click.command()
@_operator_options
def transfers(operator: str | None, output: str, timeout: float) -> None:
    """Show transfers: who has ended, who has not, and since when."""
    from rankgate.coordinator.cli import tables

    view = ask("transfers", operator, timeout)
    if output == "json":
        click.echo(document(view))
    else:
        tables.print_transfers(view.transfers or [])


def ask(view: str, operator: str | None, timeout: float) -> View:
    """Return the daemon's answer; exit 4 when nobody answers, 1 when it refuses."""
    from rankgate.coordinator.cli.client import (
        DaemonUnreachableError,
        OperatorClient,
        OperatorError,
    )

    try:
        with OperatorClient(operator or default_operator()) as client:
            return client.ask(view, timeout=timeout)
    except DaemonUnreachableError as error:
        _fail(str(error), EXIT_UNREACHABLE)
    except OperatorError as error:
        _fail(str(error), EXIT_NO)


def default_operator() -> str:
    """Return the operator endpoint that the daemon binds when it is told nothing."""
    from rankgate.coordinator.cli.config import default_operator as configured

    return configured()


def document(view: View) -> str:
    """Return a view as one JSON document; ``schema`` is always in it."""
    fields: dict[str, Any] = msgspec.to_builtins(view)
    return msgspec.json.format(msgspec.json.encode({"schema": view.schema, **fields})).decode()


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"rankgate: {text}", err=True)
    sys.exit(code)
