"""The ``rankgate`` command: one group, whose commands are imported only when they are run."""

from __future__ import annotations

import importlib

import click

from rankgate.proto import __version__

COMMANDS = {
    "serve": ("rankgate.coordinator.cli.serve:serve", "Run the daemon."),
    "demo": ("rankgate.coordinator.cli.demo.command:demo", "Move real tensors between two worlds."),
    "status": ("rankgate.coordinator.cli.status:status", "Worlds, pairs, refusals at a glance."),
    "ranks": ("rankgate.coordinator.cli.status:ranks", "Every rank and its state."),
    "pairs": ("rankgate.coordinator.cli.status:pairs", "Verdicts, findings and counts."),
    "transfers": ("rankgate.coordinator.cli.status:transfers", "Who has not ended, since when."),
}
"""Name -> where the command is, and its line in the help."""


class _Commands(click.Group):
    """A group that imports a command when it is asked for, so that ``--help`` stays fast.

    Invariant: the daemon's process never imports what only the demo needs, such as torch.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order people need them."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's list without importing anything."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rankgate")
def main() -> None:
    """Coordinate the ranks of disaggregated inference.

    Exit codes: 0 yes, 1 the answer is no, 2 usage, 3 refusal as expected (demo), 4 daemon
    unreachable, 75 transient failure, 78 configuration.
    """
