"""Errors that cross from a worker to its parent: plain values, and exceptions again."""

from __future__ import annotations

from typing import Any

from llmgw.errors import ConfigError, ConfigFault, GatewayError, PluginError


def as_values(error: BaseException) -> list[Any]:
    """``[kind, fields]`` for :func:`as_error`."""
    if isinstance(error, GatewayError):
        fields = {
            "message": error.message,
            "param": error.param,
            "retry_after_s": error.retry_after_s,
            "code": error.code,
            "status": error.status,
        }
        return ["gateway", fields, error.type]
    if isinstance(error, ConfigError):
        faults = [[fault.where, fault.what] for fault in error.faults]
        return ["config", {"faults": faults, "source": error.source}]
    if isinstance(error, PluginError):
        return ["plugin", {"message": str(error)}]
    return ["other", {"message": f"{type(error).__name__}: {error}"}]


def as_error(values: list[Any]) -> Exception:
    """What :func:`as_values` was made of; of an unforeseen one only the words."""
    kind, fields = values[0], values[1]
    if kind == "gateway":
        error = GatewayError(
            fields["message"],
            param=fields["param"],
            retry_after_s=fields["retry_after_s"],
            code=fields["code"],
            status=fields["status"],
        )
        error.type = values[2]
        return error
    if kind == "config":
        return ConfigError([ConfigFault(*fault) for fault in fields["faults"]], fields["source"])
    if kind == "plugin":
        return PluginError(fields["message"])
    return GatewayError(f"a worker failed: {fields['message']}")
