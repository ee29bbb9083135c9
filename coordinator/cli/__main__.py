"""``python -m rankgate.coordinator.cli`` is the ``rankgate`` command."""

from rankgate.coordinator.cli.main import main

main(prog_name="rankgate")
