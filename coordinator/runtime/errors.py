"""Why a daemon does not start, each with the exit code it ends with."""

from __future__ import annotations


class StartError(Exception):
    """The daemon cannot start; ``exit_code`` says whether trying again may help."""

    exit_code = 75


class ConfigurationError(StartError):
    """The configuration cannot work as it is; trying again will not help."""

    exit_code = 78
