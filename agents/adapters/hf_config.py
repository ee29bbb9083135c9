"""Reading a Hugging Face ``config.json`` without guessing: typed values, missing keys collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rankgate.proto.geometry import DTYPE_BYTES

MAX_SIZE: Final = 1 << 20
"""No model's count or dimension is larger; more is a damaged file."""

MAX_LAYERS: Final = 1 << 16
"""What one group of a descriptor can list (``proto.limits.MAX_ITEMS``)."""

CACHE_DTYPES: Final = tuple(name for name in DTYPE_BYTES if "float" in name)
"""torch's names of the types that caches and states are kept in."""


class ConfigError(ValueError):
    """A configuration that no cache can be told from; the text names the keys and what to do."""


def shown(value: object) -> str:
    """Return a value as error texts show it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004  one terminal line


class Config:
    """One model's keys; null counts as absent, and every reader checks what it returns.

    Multimodal models nest the language model in ``text_config``, which is then the only part read,
    except for what they keep outside it (``dtype``, ``quantization_config``, ``model_type``).
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"{name} is {shown(config)}; expected a JSON object")
        nested = config.get("text_config")
        text = config if nested is None else nested
        if not isinstance(text, Mapping):
            raise ConfigError(f"{name}: text_config is {shown(text)}; expected an object")
        self.name = name
        self.hints: list[str] = []
        self._outer = config
        self._text = text
        self._missing: list[str] = []
        self.model_type = self._word("model_type") or "unknown"

    def error(self, text: str) -> ConfigError:
        """Return an error about this model."""
        return ConfigError(f"{self.name} (model_type {self.model_type}): {text}")

    def expected(self, key: str, value: object, what: str) -> ConfigError:
        """Return the error about a senseless value."""
        return self.error(f"{key} is {shown(value)}; expected {what}")

    def has(self, *keys: str) -> bool:
        """Return whether any of the keys is there."""
        return any(self._text.get(key) is not None for key in keys)

    def value(self, key: str) -> object:
        """Return a key's unchecked value; None when absent."""
        return self._text.get(key)

    def outer(self, key: str) -> object:
        """Return a key that multimodal models may keep beside ``text_config``."""
        value = self._text.get(key)
        return self._outer.get(key) if value is None else value

    def whole(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number; a missing one must have been asked for with ``need``."""
        value = self._text.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.expected(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, value: object) -> float:
        """Return ``value``, which was found under ``key``, as a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.expected(key, value, "a positive number")
        return value

    def flag(self, key: str) -> bool | None:
        """Return true, false, or None when absent."""
        value = self._text.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.expected(key, value, "true or false")
        return value

    def mapping(self, key: str, value: object) -> Mapping[str, Any]:
        """Return ``value``, which was found under ``key``, as an object; empty when absent."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.expected(key, value, "an object")
        return value

    def dtype(self) -> str:
        """Return torch's name of the model's own element type."""
        here = [key for key in ("dtype", "torch_dtype") if self.has(key)]
        values = {
            key: self.cache_dtype(key, self.outer(key))
            for key in here or ("dtype", "torch_dtype")
            if self.outer(key) is not None
        }
        if len(set(values.values())) > 1:
            raise self.error(
                f"dtype {values['dtype']} contradicts torch_dtype {values['torch_dtype']};"
                " keep the one the weights have"
            )
        return next(iter(values.values()))

    def cache_dtype(self, key: str, value: object) -> str:
        """Return ``value``, given for ``key``, as one of ``CACHE_DTYPES``."""
        found = value.removeprefix("torch.") if isinstance(value, str) else value
        if not isinstance(found, str) or found not in CACHE_DTYPES:
            raise self.expected(
                key, value, f"torch's own name of a type, one of {', '.join(CACHE_DTYPES)}"
            )
        return found

    def need(self, *keys: str) -> None:
        """Note as missing that none of these alternatives is there."""
        first, *others = keys
        entry = f"{first} (or {' or '.join(others)})" if others else first
        if not self.has(*keys) and entry not in self._missing:
            self._missing.append(entry)

    def need_dtype(self) -> None:
        """Note a missing element type, which may also stand beside ``text_config``."""
        if self.outer("dtype") is None and self.outer("torch_dtype") is None:
            self.need("dtype", "torch_dtype")

    def need_model_type(self) -> None:
        """Note a missing model type: some layer rules follow from it."""
        if self.outer("model_type") is None:
            self.need("model_type")

    def settle(self) -> None:
        """Raise one error for all that was noted.

        Raises:
            ConfigError: keys are missing.
        """
        if self._missing:
            hints = "".join(f"; {hint}" for hint in self.hints)
            raise ConfigError(
                f"{self.name} (model_type {self.model_type}) lacks {', '.join(self._missing)};"
                f" expected the config.json that lies beside the model's weights{hints}"
            )

    def _word(self, key: str) -> str | None:
        value = self.outer(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{self.name}: {key} is {shown(value)}; expected a name")
        return value
