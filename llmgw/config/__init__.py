"""The configuration: TOML text to :class:`Config`, every fault with its key path.

The rooms, each knowing only those before it::

    words         how faults are worded
    files         paths, and files that hold secrets
    reader        any table against any struct
    places        URLs and endpoint strings
    bounds        what a value may be, where several keys are of a kind
    fleet_tables  the structs of backends and models
    schema        all other structs: every key, its bounds, its default
    whole         what no single key can tell
    load          from a text, a file or a command line to a Config

Others import from here and not from the rooms.
"""

from llmgw.config.files import FileSeam
from llmgw.config.fleet_tables import (
    BackendConfig,
    BackendTimeouts,
    BackendTls,
    DiscoveryConfig,
    LoaderConfig,
    ModelConfig,
    PluginConfig,
)
from llmgw.config.load import (
    Misread,
    config_from_options,
    load_config,
    parse_backend,
    parse_backend_option,
    parse_config,
    parse_store,
)
from llmgw.config.places import is_local_url, is_loopback_endpoint, port_of
from llmgw.config.schema import (
    Admission,
    Answers,
    BreakerConfig,
    Config,
    Cors,
    DrainConfig,
    FilterConfig,
    Hold,
    Limits,
    LoadingConfig,
    LogConfig,
    MetricsConfig,
    OverloadConfig,
    PeersConfig,
    RetryConfig,
    StoreConfig,
    Timeouts,
    TracingConfig,
)
from llmgw.values import Secret

__all__ = [
    "Admission",
    "Answers",
    "BackendConfig",
    "BackendTimeouts",
    "BackendTls",
    "BreakerConfig",
    "Config",
    "Cors",
    "DiscoveryConfig",
    "DrainConfig",
    "FileSeam",
    "FilterConfig",
    "Hold",
    "Limits",
    "LoaderConfig",
    "LoadingConfig",
    "LogConfig",
    "MetricsConfig",
    "Misread",
    "ModelConfig",
    "OverloadConfig",
    "PeersConfig",
    "PluginConfig",
    "RetryConfig",
    "Secret",
    "StoreConfig",
    "Timeouts",
    "TracingConfig",
    "config_from_options",
    "is_local_url",
    "is_loopback_endpoint",
    "load_config",
    "parse_backend",
    "parse_backend_option",
    "parse_config",
    "parse_store",
    "port_of",
]
