"""The shipped unit and example: systemd takes them, and they say what the code does."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankgate.coordinator.cli.config import KEYS, load_config

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd/rankgated.service"
EXAMPLE = ROOT / "systemd/rankgate.toml"
SHIPPED = "/opt/rankgate/bin/rankgate"
SERVICE = {"RUNTIME_DIRECTORY": "/run/rankgate", "STATE_DIRECTORY": "/var/lib/rankgate"}

ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def unit() -> configparser.ConfigParser:
    """Return the unit's sections."""
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(UNIT)
    return read


def runnable(folder: Path) -> Path:
    """Return a copy of the unit whose program exists here."""
    copy = folder / UNIT.name
    copy.write_text(UNIT.read_text().replace(SHIPPED, sys.executable))
    return copy


@needs_analyze
def test_systemd_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    """No unknown directive, no wrong value, on this systemd."""
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(runnable(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_analyze
def test_the_sandbox_stays_tight(tmp_path: Path) -> None:
    """The exposure that systemd computes is at most 1.5 of 10."""
    done = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", "--no-pager", str(runnable(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level, done.stdout + done.stderr
    assert float(level[1]) <= 1.5


def test_descriptors_suffice_for_the_largest_world() -> None:
    """Twice the ranks that the protocol allows (case E06)."""
    assert int(unit()["Service"]["LimitNOFILE"]) >= 2 * (1 << 16)


def test_systemd_watches_the_serving_loop() -> None:
    """READY, watchdog and restart are on; what cannot work is not tried again."""
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["WatchdogSec"] == "20s"
    assert service["Restart"] == "on-failure"
    assert "78" in service["RestartPreventExitStatus"].split()


def test_directories_are_made_by_systemd() -> None:
    """With modes that keep others out."""
    service = unit()["Service"]
    for kind in ("Runtime", "State"):
        assert service[f"{kind}Directory"] == "rankgate"
        assert service[f"{kind}DirectoryMode"] == "0750"


def test_the_example_is_the_defaults(tmp_path: Path) -> None:
    """As shipped it sets nothing; every key is in it, and uncommented it sets the defaults."""
    defaults = load_config(None, {}, SERVICE)
    assert load_config(EXAMPLE, {}, SERVICE) == defaults
    text = re.sub(r"^# ([a-z_]+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(text)
    assert load_config(tmp_path / "all.toml", {}, SERVICE) == defaults
    named = set(re.findall(r"^([a-z_]+) = ", text, flags=re.MULTILINE))
    assert named == {key.split(".")[-1] for key in KEYS}


def _box() -> Path | None:
    """Return a program that runs a command beside a real systemd, if there is one."""
    given = os.environ.get("RANKGATE_SYSTEMD_BOX", "")
    box = Path(given) if given else ROOT.parent / "shared/systemd-box"
    return box if os.access(box, os.X_OK) else None


_IN_BOX = """
set -eu
rm -rf /var/lib/rankgate /var/lib/private/rankgate  # of the host, seen through the overlay
for one in {python} {real} {root}/coordinator; do  # the box is thrown away
  while [ "$one" != / ]; do one=$(dirname "$one"); chmod a+x "$one"; done
done
mkdir -p /etc/systemd/system/rankgated.service.d /etc/rankgate
cp {root}/systemd/rankgated.service /etc/systemd/system/
cp {root}/systemd/rankgate.toml /etc/rankgate/
cat > /etc/systemd/system/rankgated.service.d/test.conf <<'END'
[Service]
Environment=PYTHONPATH={path}
Environment=PYTHONDONTWRITEBYTECODE=1
ProtectHome=no
ExecStartPre=
ExecStart=
ExecStart={python} -m rankgate.coordinator.cli serve --config /etc/rankgate/rankgate.toml
END
systemctl daemon-reload
if ! systemctl start rankgated; then journalctl -u rankgated --no-pager | tail -30; exit 9; fi
show() {{ systemctl show rankgated -P "$1"; }}
echo "active $(show ActiveState)"
echo "status $(show StatusText)"
echo "sockets $(stat -c '%a' /run/rankgate/agents.sock /run/rankgate/operator.sock | xargs)"
echo "directory $(stat -Lc '%a' /run/rankgate)"
echo "database $(stat -Lc '%a' /var/lib/rankgate/rankgate.db)"
echo "user $(ps -o user= -p $(show MainPID))"
first=$(show MainPID)
kill -9 $first
for _ in $(seq 100); do
  [ "$(show MainPID)" != "$first" ] && [ "$(show ActiveState)" = active ] && break; sleep 0.1
done
echo "restarts $(show NRestarts) $(show ActiveState)"
journalctl -u rankgated -o cat --no-pager | grep daemon_ready | tail -1
journalctl -u rankgated -o json --no-pager | grep daemon_ready | grep -o '"PRIORITY":"."' | tail -1
begun=$(date +%s%N); systemctl stop rankgated; ended=$(date +%s%N)
echo "stopped $(show Result) $(( (ended - begun) / 1000000 )) ms"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a systemd of its own needs root")
@pytest.mark.skipif(_box() is None, reason="set RANKGATE_SYSTEMD_BOX to run beside a real systemd")
def test_a_real_systemd_starts_restarts_and_stops_it() -> None:
    """READY, sandbox, modes, restart after kill -9, journal priorities, a quick stop."""
    path = os.pathsep.join(one for one in sys.path if one)
    real = Path(sys.executable).resolve()
    if any(str(one).startswith("/tmp/") for one in (ROOT, real, sys.executable)):  # noqa: S108
        pytest.skip("the box has a /tmp of its own: neither checkout nor Python may be there")
    script = _IN_BOX.format(root=ROOT, path=path, python=sys.executable, real=real)
    done = subprocess.run(
        [str(_box()), "-t", "90", "bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("RANKGATE_")},
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    lines = said.splitlines()
    assert "active active" in lines, said
    assert "status 0/0 worlds sealed, 0/0 pairs ready" in lines, said
    assert "sockets 660 660" in lines, said
    assert "directory 750" in lines, said
    assert "database 600" in lines, said
    assert "user rankgate" in lines, said
    assert "restarts 1 active" in lines, said
    assert any('"start": 2' in line for line in lines), said
    assert '"PRIORITY":"6"' in lines, said
    (stopped,) = (line.split() for line in lines if line.startswith("stopped "))
    assert stopped[1] == "success", said
    assert int(stopped[2]) < 2500, said
