"""``rankgate serve``: the daemon in the foreground, as systemd runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from rankgate.coordinator.cli.config import Origin, load_config, make_folders
from rankgate.coordinator.runtime.daemon import run_daemon
from rankgate.coordinator.runtime.errors import StartError
from rankgate.coordinator.runtime.log import (
    FORMATS,
    LEVELS,
    configure_logging,
    is_journal,
)

_FLAGS = {
    "listen": "listen",
    "operator": "operator",
    "state_dir": "state_dir",
    "insecure": "insecure",
    "max_ranks": "max_ranks",
    "log_level": "log.level",
    "log_format": "log.format",
    "heartbeat": "liveness.heartbeat",
    "ttl": "liveness.ttl",
    "probe": "liveness.probe",
    "resume": "liveness.resume",
    "stall": "liveness.stall",
    "form_grace": "liveness.form_grace",
    "grant_ttl": "grants.ttl",
    "max_grant_ttl": "grants.max_ttl",
    "max_transfers": "grants.max_transfers",
}


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--listen", multiple=True, help="Endpoint for agents; may be given several times.")
@click.option("--operator", help="Endpoint for operators (ipc).")
@click.option("--state-dir", help="Directory of the database.")
@click.option("--insecure", is_flag=True, default=None, help="Allow plain tcp.")
@click.option("--max-ranks", help="Ranks to have descriptors for.")
@click.option("--heartbeat", help="How often agents say they live (seconds, or 500ms).")
@click.option("--ttl", help="Silence after which a rank is stalled.")
@click.option("--probe", help="How long an older round has to answer.")
@click.option("--resume", help="How long a lost connection may come back.")
@click.option("--stall", help="Silence after which a stalled rank is gone.")
@click.option("--form-grace", help="Time a world has to become complete.")
@click.option("--grant-ttl", help="Life of a grant.")
@click.option("--max-grant-ttl", help="Longest life of a grant.")
@click.option("--max-transfers", help="Transfers and tombstones held.")
@click.option("--log-level", type=click.Choice(LEVELS))
@click.option("--log-format", type=click.Choice(FORMATS))
@click.option("--check", is_flag=True, help="Check the configuration and end.")
def serve(config: Path | None, check: bool, **flags: Any) -> None:  # noqa: ANN401, FBT001 - click's flags
    """Run the daemon until SIGTERM.

    Flags go over the environment (RANKGATE_LIVENESS_TTL), which goes over the file.
    """
    given = {
        _FLAGS[name]: Origin(value, f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value not in (None, ())
    }
    try:
        loaded = load_config(config, given)
        if check:
            click.echo("the configuration is sound")
            return
        configure_logging(
            loaded.log_level, loaded.log_format, journal=is_journal(os.environ, sys.stderr)
        )
        make_folders(loaded)
        code = run_daemon(loaded.daemon)
    except StartError as error:
        click.echo(f"rankgate: {error}", err=True)
        code = error.exit_code
    sys.exit(code)
