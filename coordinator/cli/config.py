"""The daemon's configuration: defaults < TOML file < environment < flags, and where each came from.

An unknown key is an error with a suggestion: a misspelt limit must not be a silent default.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from rankgate.coordinator.core.settings import Settings
from rankgate.coordinator.runtime.daemon import DaemonConfig
from rankgate.coordinator.runtime.errors import ConfigurationError
from rankgate.coordinator.runtime.log import FORMATS, LEVELS

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\Z")
_UNITS = {"ms": 1, None: 1000, "s": 1000, "m": 60_000, "h": 3_600_000}
_LONGEST_MS = 7 * 24 * 3_600_000


class Config(Struct, frozen=True, kw_only=True):
    """A checked configuration."""

    daemon: DaemonConfig
    log_level: str
    log_format: str


class Origin(NamedTuple):
    """A raw value and where it was set."""

    value: Any
    source: str


def _duration(key: str, raw: Origin) -> int:
    """Return milliseconds: a number of seconds, or text such as ``500ms`` or ``2m``."""
    found = None if isinstance(raw.value, bool) else _DURATION.match(str(raw.value).strip())
    ms = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 0 < ms <= _LONGEST_MS:
        raise _wrong(key, raw, "a time above 0 such as 5, 0.5 or '500ms' (0 never means for ever)")
    return ms


def _count(key: str, raw: Origin) -> int:
    text = str(raw.value)
    if isinstance(raw.value, bool) or not text.isdigit() or not 0 < int(text) <= 1 << 31:
        raise _wrong(key, raw, "a whole number above 0")
    return int(text)


def _flag(key: str, raw: Origin) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    text = str(raw.value).lower()
    if text not in known:
        raise _wrong(key, raw, "true or false")
    return known[text]


def _text(key: str, raw: Origin) -> str:
    if not isinstance(raw.value, str) or not raw.value:
        raise _wrong(key, raw, "text")
    return raw.value


def _endpoint(key: str, raw: Origin) -> str:
    text = _text(key, raw)
    if not text.startswith(("ipc://", "tcp://")):
        raise _wrong(key, raw, "an endpoint such as ipc:///run/rankgate/agents.sock")
    return text


def _operator(key: str, raw: Origin) -> str:
    text = _endpoint(key, raw)
    if not text.startswith("ipc://"):
        raise _wrong(key, raw, "an ipc endpoint: operators come over a unix socket only")
    return text


def _endpoints(key: str, raw: Origin) -> list[str]:
    listed = raw.value.split(",") if isinstance(raw.value, str) else raw.value
    if not isinstance(listed, list | tuple) or not listed:
        raise _wrong(key, raw, "a list of endpoints")
    return [_endpoint(key, Origin(item, raw.source)) for item in listed]


def _one_of(*known: str) -> Callable[[str, Origin], str]:
    def parse(key: str, raw: Origin) -> str:
        if raw.value not in known:
            raise _wrong(key, raw, f"one of {', '.join(known)}")
        return str(raw.value)

    return parse


_DEFAULTS = Settings()

KEYS: dict[str, tuple[Callable[[str, Origin], Any], str]] = {
    "listen": (_endpoints, "endpoints that agents connect to"),
    "operator": (_operator, "endpoint that operators connect to (ipc)"),
    "state_dir": (_text, "directory of the database"),
    "insecure": (_flag, "allow plain tcp, readable and forgeable by anyone who reaches it"),
    "max_ranks": (_count, "ranks to have descriptors for"),
    "log.level": (_one_of(*LEVELS), "least level that is logged"),
    "log.format": (_one_of(*FORMATS), "console, json, or auto"),
    "liveness.heartbeat": (_duration, "how often agents say they live"),
    "liveness.ttl": (_duration, "silence after which a rank is stalled (>= 3 heartbeats)"),
    "liveness.probe": (_duration, "how long an older round has to answer"),
    "liveness.resume": (_duration, "how long a lost connection may come back"),
    "liveness.stall": (_duration, "silence after which a stalled rank is gone"),
    "liveness.form_grace": (_duration, "time a world has to become complete"),
    "grants.ttl": (_duration, "life of a grant"),
    "grants.max_ttl": (_duration, "longest life of a grant that an open may ask for"),
    "grants.max_transfers": (_count, "transfers and tombstones held"),
}
"""Every key: its parser and what it is for."""


def load_config(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Config:
    """Return the checked configuration.

    Args:
        path: a TOML file, or None.
        flags: key -> value of the flags that were given.
        environment: ``os.environ`` by default; ``RANKGATE_LIVENESS_TTL`` sets ``liveness.ttl``.

    Raises:
        ConfigurationError: names key, value, where it was set, and what is expected.
    """
    environ = os.environ if environment is None else environment
    raw: dict[str, Origin] = dict(_places(environ))
    if path is not None:
        raw |= _from_file(path)
    raw |= _from_environment(environ)
    raw |= {key: Origin(value, f"--{key.split('.')[-1]}") for key, value in flags.items()}
    values = {key: KEYS[key][0](key, origin) for key, origin in raw.items()}
    _check(values, raw)
    return Config(
        daemon=DaemonConfig(
            listen=values["listen"],
            operator=values["operator"],
            state_dir=Path(values["state_dir"]),
            insecure=values.get("insecure", False),
            max_ranks=values.get("max_ranks", 4096),
            settings=_settings(values),
        ),
        log_level=values.get("log.level", "info"),
        log_format=values.get("log.format", "auto"),
    )


def default_operator(environment: Mapping[str, str] | None = None) -> str:
    """Return where the operator socket is unless configured otherwise."""
    environ = os.environ if environment is None else environment
    return environ.get("RANKGATE_OPERATOR") or f"ipc://{_runtime_dir(environ)}/operator.sock"


def _runtime_dir(environ: Mapping[str, str]) -> str:
    if given := environ.get("RUNTIME_DIRECTORY"):
        return given.split(":")[0]
    if os.geteuid() != 0 and (mine := environ.get("XDG_RUNTIME_DIR")):
        return f"{mine}/rankgate"
    return "/run/rankgate"


def _state_dir(environ: Mapping[str, str]) -> str:
    if given := environ.get("STATE_DIRECTORY"):
        return given.split(":")[0]
    if os.geteuid() != 0:
        return f"{environ.get('XDG_STATE_HOME') or Path.home() / '.local/state'}/rankgate"
    return "/var/lib/rankgate"


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, Origin]]:
    folder = _runtime_dir(environ)
    yield "listen", Origin([f"ipc://{folder}/agents.sock"], "default")
    yield "operator", Origin(f"ipc://{folder}/operator.sock", "default")
    yield "state_dir", Origin(_state_dir(environ), "default")


def _from_file(path: Path) -> dict[str, Origin]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    found: dict[str, Origin] = {}
    for key, value in table.items():
        items = (
            {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        )
        for name, item in items.items():
            if name not in KEYS:
                raise ConfigurationError(f"{path}: unknown key {name!r}{_suggest(name, KEYS)}")
            found[name] = Origin(item, str(path))
    return found


_NOT_SETTINGS = frozenset({"RANKGATE_WORLD", "RANKGATE_ROUND", "RANKGATE_DAEMON", "RANKGATE_LINK"})
"""Variables of the agents; the daemon may share their environment."""


def _from_environment(environ: Mapping[str, str]) -> dict[str, Origin]:
    names = {f"RANKGATE_{key.upper().replace('.', '_')}": key for key in KEYS}
    found: dict[str, Origin] = {}
    for name, value in environ.items():
        if name in names:
            found[names[name]] = Origin(value, name)
        elif name.startswith("RANKGATE_") and name not in _NOT_SETTINGS:
            raise ConfigurationError(f"unknown variable {name!r}{_suggest(name, names)}")
    return found


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _wrong(key: str, raw: Origin, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{key} = {raw.value!r} (from {raw.source}): expected {expected}")


def _settings(values: Mapping[str, Any]) -> Settings:
    names = {"grants.ttl": "grant_ttl", "grants.max_ttl": "max_grant_ttl"}
    given = {
        names.get(key, key.split(".")[1]): value
        for key, value in values.items()
        if key.startswith(("liveness.", "grants."))
    }
    return Settings(**given)


def _check(values: Mapping[str, Any], raw: Mapping[str, Origin]) -> None:
    rules = _settings(values)
    if rules.ttl < 3 * rules.heartbeat:
        origin = raw.get("liveness.ttl") or raw.get("liveness.heartbeat") or Origin(0, "default")
        raise ConfigurationError(
            f"liveness.ttl = {rules.ttl} ms (from {origin.source}): expected at least 3 x"
            f" liveness.heartbeat = {3 * rules.heartbeat} ms, or healthy ranks would be taken for"
            " stalled"
        )
    if rules.grant_ttl > rules.max_grant_ttl:
        raise ConfigurationError(
            f"grants.ttl = {rules.grant_ttl} ms: expected at most grants.max_ttl ="
            f" {rules.max_grant_ttl} ms"
        )
    plain = [one for one in values["listen"] if one.startswith("tcp://")]
    if plain and not values.get("insecure", False):
        raise ConfigurationError(
            f"listen = {plain[0]!r} (from {raw['listen'].source}): plain tcp lets anyone who"
            " reaches it register ranks; expected ipc endpoints, or --insecure to accept that"
        )
