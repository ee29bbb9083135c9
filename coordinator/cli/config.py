"""The daemon's configuration: defaults < TOML file < environment < flags, and where each came from.

An unknown key is an error with a suggestion: a misspelt limit must not be a silent default.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from rankgate.coordinator.core.settings import Settings
from rankgate.coordinator.runtime.daemon import DaemonConfig
from rankgate.coordinator.runtime.errors import ConfigurationError
from rankgate.coordinator.runtime.log import FORMATS, LEVELS

_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h)?\Z")
_COUNT = re.compile(r"[0-9]{1,10}\Z")
_UNITS = {"ms": 1, None: 1000, "s": 1000, "m": 60_000, "h": 3_600_000}
_MISSPELT = 0.75
_LONGEST_MS = 7 * 24 * 3_600_000


class Config(Struct, frozen=True, kw_only=True):
    """A checked configuration."""

    daemon: DaemonConfig
    log_level: str
    log_format: str
    folders: Sequence[Path] = ()
    """Default directories, which are made when missing; those that were set must be there."""


class Origin(NamedTuple):
    """A raw value and where it was set."""

    value: Any
    source: str


def _duration(key: str, raw: Origin) -> int:
    """Return milliseconds: a number of seconds, or text such as ``500ms`` or ``2m``."""
    found = None if isinstance(raw.value, bool) else _DURATION.match(str(raw.value).strip())
    ms = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 0 < ms <= _LONGEST_MS:
        raise _wrong(key, raw, "a time above 0 such as 5, 0.5 or '500ms' (0 never means for ever)")
    return ms


def _count(key: str, raw: Origin) -> int:
    text = str(raw.value)
    if isinstance(raw.value, bool) or not _COUNT.match(text) or not 0 < int(text) <= 1 << 31:
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
    path: Path | None, flags: Mapping[str, Origin], environment: Mapping[str, str] | None = None
) -> Config:
    """Return the checked configuration.

    Args:
        path: a TOML file, or None.
        flags: key -> value and name of the flags that were given.
        environment: ``os.environ`` by default; ``RANKGATE_LIVENESS_TTL`` sets ``liveness.ttl``.

    Raises:
        ConfigurationError: names key, value, where it was set, and what is expected.
    """
    environ = os.environ if environment is None else environment
    raw: dict[str, Origin] = dict(_places(environ))
    if path is not None:
        raw |= _from_file(path)
    raw |= _from_environment(environ)
    raw |= flags
    values = {key: KEYS[key][0](key, origin) for key, origin in raw.items()}
    values.setdefault("operator", _beside(values["listen"], environ))
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
        folders=list(_default_folders(raw, environ)),
    )


def make_folders(config: Config) -> None:
    """Make the default directories that are missing, mode 0750.

    Raises:
        ConfigurationError: with the path that cannot be made.
    """
    for folder in config.folders:
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot make {folder}: {error.strerror}") from error


def default_operator(environment: Mapping[str, str] | None = None) -> str:
    """Return where the operator socket is unless configured otherwise."""
    environ = os.environ if environment is None else environment
    if given := environ.get("RANKGATE_OPERATOR"):
        return given
    own, system = Path(_runtime_dir(environ), "operator.sock"), Path(_SYSTEM_RUN, "operator.sock")
    return f"ipc://{own if own.exists() or not system.exists() else system}"


_SYSTEM_RUN = "/run/rankgate"
"""Where the service's sockets are; an operator's own daemon goes before it."""


def _runtime_dir(environ: Mapping[str, str]) -> str:
    if given := environ.get("RUNTIME_DIRECTORY"):
        return given.split(":")[0]
    if os.geteuid() != 0 and (mine := environ.get("XDG_RUNTIME_DIR")):
        return f"{mine}/rankgate"
    return _SYSTEM_RUN


def _state_dir(environ: Mapping[str, str]) -> str:
    if given := environ.get("STATE_DIRECTORY"):
        return given.split(":")[0]
    if os.geteuid() != 0:
        return f"{environ.get('XDG_STATE_HOME') or Path.home() / '.local/state'}/rankgate"
    return "/var/lib/rankgate"


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, Origin]]:
    folder = _runtime_dir(environ)
    yield "listen", Origin([f"ipc://{folder}/agents.sock"], "default")
    yield "state_dir", Origin(_state_dir(environ), "default")


def _beside(listen: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the operator endpoint in the directory of the first ipc endpoint for agents."""
    for endpoint in listen:
        if endpoint.startswith("ipc:///"):
            return f"{endpoint.rpartition('/')[0]}/operator.sock"
    return f"ipc://{_runtime_dir(environ)}/operator.sock"


def _default_folders(raw: Mapping[str, Origin], environ: Mapping[str, str]) -> Iterator[Path]:
    listed = raw["listen"]
    beside = any(str(one).startswith("ipc:///") for one in listed.value)
    needed = listed.source == "default" or ("operator" not in raw and not beside)
    if needed and "RUNTIME_DIRECTORY" not in environ:
        yield Path(_runtime_dir(environ))
    if raw["state_dir"].source == "default" and "STATE_DIRECTORY" not in environ:
        yield Path(_state_dir(environ))


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


def _from_environment(environ: Mapping[str, str]) -> dict[str, Origin]:
    """Return the settings among the variables.

    Agents have RANKGATE_ variables too and may share the environment: only what looks like a
    misspelt setting is refused.
    """
    names = {key.upper().replace(".", "_"): key for key in KEYS}
    sections = tuple({f"{key.split('.')[0].upper()}_" for key in KEYS if "." in key})
    found: dict[str, Origin] = {}
    for variable, value in environ.items():
        name = variable.removeprefix("RANKGATE_")
        if name == variable:
            continue
        if name in names:
            found[names[name]] = Origin(value, variable)
        elif name.startswith(sections) or difflib.get_close_matches(name, names, 1, _MISSPELT):
            known = [f"RANKGATE_{one}" for one in names]
            raise ConfigurationError(f"unknown variable {variable!r}{_suggest(variable, known)}")
    return found


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
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
