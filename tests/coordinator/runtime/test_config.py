"""Configuration: file < environment < flags, and errors that say where to look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rankgate.coordinator.cli.config import (
    KEYS,
    Config,
    Origin,
    default_operator,
    load_config,
    make_folders,
)
from rankgate.coordinator.core.settings import Settings
from rankgate.coordinator.runtime.errors import ConfigurationError

SERVICE = {"RUNTIME_DIRECTORY": "/run/rankgate", "STATE_DIRECTORY": "/var/lib/rankgate"}


def load(
    text: str | None = None,
    flags: Mapping[str, Any] | None = None,
    tmp_path: Path | None = None,
    **variables: str,
) -> Config:
    """Load with a file's text, flags and variables."""
    path = None
    if text is not None:
        assert tmp_path is not None
        path = tmp_path / "rankgate.toml"
        path.write_text(text)
    given = {key: Origin(value, f"--{key}") for key, value in (flags or {}).items()}
    return load_config(path, given, SERVICE | variables)


def refused(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as load
    """Return the words of the refusal."""
    with pytest.raises(ConfigurationError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_defaults_are_those_of_the_core() -> None:
    """Nothing set: the core's own rules, and the directories systemd made."""
    config = load()
    assert config.daemon.settings == Settings()
    assert config.daemon.listen == ["ipc:///run/rankgate/agents.sock"]
    assert config.daemon.operator == "ipc:///run/rankgate/operator.sock"
    assert config.daemon.state_dir == Path("/var/lib/rankgate")
    assert not config.daemon.insecure
    assert config.folders == []


def test_flags_go_over_variables_over_the_file(tmp_path: Path) -> None:
    """Each level sets what the ones before it did not."""
    text = "[liveness]\nttl = 10\nprobe = 2\nstall = 90\n"
    config = load(
        text,
        {"liveness.ttl": "30s"},
        tmp_path,
        RANKGATE_LIVENESS_TTL="20",
        RANKGATE_LIVENESS_PROBE="3",
    )
    rules = config.daemon.settings
    assert (rules.ttl, rules.probe, rules.stall) == (30_000, 3000, 90_000)


@pytest.mark.parametrize(
    ("said", "ms"),
    [("500ms", 500), (0.5, 500), ("2m", 120_000), ("0.57", 570), (1, 1000), ("1h", 3_600_000)],
)
def test_times_are_seconds_or_say_their_unit(said: object, ms: int) -> None:
    """A bare number is seconds."""
    assert load(flags={"liveness.probe": said}).daemon.settings.probe == ms


@pytest.mark.parametrize("said", [0, "0", "0ms", -1, "-1", "soon", "", True, "1e3", float("nan")])
@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("liveness.")])
def test_times_are_above_zero(key: str, said: object) -> None:
    """Zero never means for ever (case B22), and no time is guessed."""
    words = refused(flags={key: said})
    assert words.startswith(f"{key} = {said!r} (from --{key}): expected a time above 0")


def test_a_ttl_needs_three_heartbeats() -> None:
    """Whichever of the two was set is named (case C22)."""
    words = refused(flags={"liveness.ttl": 30, "liveness.heartbeat": 20})
    assert "liveness.ttl = 30000 ms (from --liveness.ttl)" in words
    assert "60000 ms" in words
    assert "(from RANKGATE_LIVENESS_HEARTBEAT)" in refused(RANKGATE_LIVENESS_HEARTBEAT="2")


def test_a_grant_ttl_is_at_most_its_bound() -> None:
    """Both numbers are named."""
    words = refused(flags={"grants.ttl": 700})
    assert "700000" in words
    assert "600000" in words


def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path) -> None:
    """It is never a silent default."""
    words = refused("[liveness]\nheartbeet = 3\n", None, tmp_path)
    assert "'liveness.heartbeet'; did you mean 'liveness.heartbeat'?" in words
    assert "unknown key 'zzz'; known are listen," in refused("zzz = 3\n", None, tmp_path)


def test_a_misspelt_variable_gets_a_suggestion() -> None:
    """Whatever begins like a section, or nearly is a setting."""
    words = refused(RANKGATE_LIVENESS_HEARTBEET="3")
    assert "did you mean 'RANKGATE_LIVENESS_HEARTBEAT'?" in words
    assert "did you mean 'RANKGATE_INSECURE'?" in refused(RANKGATE_INSECUR="1")


@pytest.mark.parametrize("name", ["WORLD", "ROUND", "DAEMON", "LINK", "SYSTEMD_BOX"])
def test_variables_of_agents_are_left_alone(name: str) -> None:
    """A daemon may be started from an engine's environment."""
    load_config(None, {}, {**SERVICE, f"RANKGATE_{name}": "x"})


def test_plain_tcp_is_refused_without_insecure() -> None:
    """Loopback too: any local user reaches it."""
    words = refused(flags={"listen": ["tcp://127.0.0.1:5555"]})
    assert "tcp://127.0.0.1:5555" in words
    assert "--insecure" in words
    config = load(flags={"listen": ["tcp://127.0.0.1:5555"], "insecure": True})
    assert config.daemon.insecure


@pytest.mark.parametrize("operator", ["tcp://127.0.0.1:1", "nowhere", ""])
def test_operators_come_over_ipc_only(operator: str) -> None:
    """Queries are not authenticated but by the socket's mode."""
    assert "operator = " in refused(flags={"operator": operator})


def test_the_operator_socket_is_beside_the_agents() -> None:
    """Unless it is set."""
    config = load(flags={"listen": ["ipc:///srv/x/agents.sock"]})
    assert config.daemon.operator == "ipc:///srv/x/operator.sock"


def test_several_endpoints_come_from_one_variable() -> None:
    """Separated by commas."""
    config = load(RANKGATE_LISTEN="ipc:///a/x,ipc:///b/y")
    assert config.daemon.listen == ["ipc:///a/x", "ipc:///b/y"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("insecure", "maybe", "true or false"),
        ("max_ranks", "many", "a whole number above 0"),
        ("max_ranks", True, "a whole number above 0"),
        ("max_ranks", "²", "a whole number above 0"),
        ("grants.max_transfers", 0, "a whole number above 0"),
        ("log.level", "loud", "one of debug, info, warning, error"),
        ("log.format", "xml", "one of auto, console, json"),
        ("state_dir", 3, "text"),
        ("listen", [], "a list of endpoints"),
        ("listen", ["udp://x"], "an endpoint such as"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, expected: str) -> None:
    """Key, value, where it was set, what is expected."""
    words = refused(flags={key: value})
    assert f"{key} = " in words
    assert f"(from --{key})" in words
    assert expected in words


@pytest.mark.parametrize("text", ["listen = [", "\x00", "a = 1\na = 2\n"])
def test_an_unreadable_file_is_named(text: str, tmp_path: Path) -> None:
    """With what the parser says."""
    assert f"cannot read {tmp_path}/rankgate.toml" in refused(text, None, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that was asked for must be there."""
    with pytest.raises(ConfigurationError, match=r"cannot read .*nothing"):
        load_config(tmp_path / "nothing", {}, SERVICE)


def test_a_user_gets_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The XDG ones, made when missing; those that were set are never made."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    variables = {
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    config = load_config(None, {}, variables)
    assert config.daemon.listen == [f"ipc://{tmp_path}/run/rankgate/agents.sock"]
    assert config.daemon.state_dir == tmp_path / "state/rankgate"
    make_folders(config)
    make_folders(config)
    assert (tmp_path / "run/rankgate").is_dir()
    assert (tmp_path / "state/rankgate").is_dir()
    elsewhere = {"state_dir": Origin(str(tmp_path / "set"), "--state-dir")}
    assert load_config(None, elsewhere, variables).folders == [tmp_path / "run/rankgate"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """With the path."""
    (tmp_path / "file").write_text("")
    config = load()
    with pytest.raises(ConfigurationError, match=r"cannot make .*file/x"):
        make_folders(
            Config(
                daemon=config.daemon,
                log_level="info",
                log_format="json",
                folders=[tmp_path / "file/x"],
            )
        )


def test_clients_find_their_own_daemon_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, then the user's socket, then the service's."""
    assert default_operator({"RANKGATE_OPERATOR": "ipc:///x"}) == "ipc:///x"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("rankgate.coordinator.cli.config._SYSTEM_RUN", str(tmp_path / "sys"))
    mine = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert default_operator(mine) == f"ipc://{tmp_path}/rankgate/operator.sock"
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/operator.sock").touch()
    assert default_operator(mine) == f"ipc://{tmp_path}/sys/operator.sock"
    (tmp_path / "rankgate").mkdir()
    (tmp_path / "rankgate/operator.sock").touch()
    assert default_operator(mine) == f"ipc://{tmp_path}/rankgate/operator.sock"
