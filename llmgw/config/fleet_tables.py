"""The tables of who answers: backends, where they are learnt from, their models.

As all of :mod:`llmgw.config.schema`, whose reading rules hold here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct, field

from llmgw.config.bounds import Count, CountOrNone, ModelName, Seconds, Size, Tokens, Word
from llmgw.config.files import absolute_path, existing_file, private_path, secret_file
from llmgw.config.places import allowed_place, base_url
from llmgw.config.reader import Reader, Rule
from llmgw.config.words import key_path
from llmgw.core.allowed import DEFAULT
from llmgw.values import Caps, Secret


class PluginConfig(Struct, frozen=True):
    """A plugin by name, and its own table as it stands in the file."""

    rest: ClassVar[str] = "options"
    not_keys: ClassVar[tuple[str, ...]] = ("options",)

    plugin: Annotated[str, Rule(filled=True)]
    options: Mapping[str, Any] = field(default_factory=dict)


class LoaderConfig(Struct, frozen=True):
    """What loads models on a backend; its plugin's name alone may stand for the table.

    ``none`` is nobody, where else a llama-server in router mode would get its own.
    """

    rest: ClassVar[str] = "options"
    short: ClassVar[str] = "plugin"
    not_keys: ClassVar[tuple[str, ...]] = ("options",)

    plugin: Annotated[str, Rule(filled=True)]
    options: Mapping[str, Any] = field(default_factory=dict)


class BackendTls(Struct, frozen=True):
    """How a backend's certificate is checked.

    :param ca_file: trust these authorities in place of the system's.
    :param cert_file: show this certificate, of the key in ``key_file`` (absent: in the same file).
    """

    verify: bool = True
    ca_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    cert_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    key_file: Annotated[str | None, Rule(filled=True, convert=private_path)] = None


class BackendTimeouts(Struct, frozen=True):
    """What differs for this backend from ``[timeouts]``; ``None`` is what stands there."""

    response_head_s: Seconds | None = None
    first_token_s: Seconds | None = None


class BackendConfig(Struct, frozen=True):
    """One backend.

    :param url: in its one form, see :func:`~llmgw.config.places.base_url`.
    :param models: ``None``: ask it. So with ``max_connections`` and ``context_length``.
    :param health: name of the health plugin, ``None`` for the configured ones.
    :param raw: never turn a call that is not streamed into a streamed one.
    :param loader: what loads models there; ``None``: found out.
    :param max_models: models in its memory at a time, ``None``: what its loader says.
    :param model_memory_bytes: what all of these may take together.
    """

    id: Word
    url: Annotated[str, Rule(convert=base_url)]
    weight: Annotated[float, Rule(above=0, most=1e9)] = 1.0
    models: Annotated[tuple[ModelName, ...] | None, Rule(filled=True)] = None
    max_connections: Annotated[int, Rule(least=1, most=1_000_000)] | None = None
    context_length: Tokens | None = None
    api_key: Annotated[Secret | None, Rule(convert=secret_file)] = field(default=None, name="api_key_file")
    health: Annotated[str | None, Rule(filled=True)] = None
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["auto", "llama-server", "openai", "ollama"] = "auto"
    raw: bool = False
    loader: LoaderConfig | None = None
    max_models: Annotated[int, Rule(least=1, most=10_000)] | None = None
    model_memory_bytes: Size | None = None
    tls: BackendTls = BackendTls()
    timeouts: BackendTimeouts = BackendTimeouts()


def _backend_defaults(reader: Reader, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of :class:`BackendConfig` by name; what makes a backend that one is left out."""
    for key in ("id", "url"):
        if key in table:
            reader.fault(key_path(where, key), "is each backend's own")
    shared = {key: value for key, value in table.items() if key not in ("id", "url")}
    return reader.fields(BackendConfig, shared, where, BackendConfig(id="", url=""))


def _state_path(reader: Reader, where: str, path: str) -> str:
    return absolute_path(reader, path)


class DiscoveryConfig(Struct, frozen=True):
    """Where backends are learnt from while the gateway runs, and what is thought of that word.

    :param allow: hosts that what is found may be at (`llmgw.core.allowed`).
    :param hold_down_s: what vanishes is kept for so long; 0 lets it go at once.
    :param mass_hold_s: and for so long if more than half vanishes at a time.
    :param state_file: absolute; keeps the last set for the next start.
    :param defaults: attributes of :class:`BackendConfig` for what an entry leaves out.
    """

    rest: ClassVar[str] = "options"
    not_keys: ClassVar[tuple[str, ...]] = ("options",)

    plugin: Annotated[str, Rule(filled=True)]
    allow: tuple[Annotated[str, Rule(convert=allowed_place)], ...] = DEFAULT
    hold_down_s: Annotated[float, Rule(least=0, most=3600)] = 5.0
    mass_hold_s: Annotated[float, Rule(least=0, most=86_400)] = 60.0
    state_file: Annotated[str | None, Rule(filled=True, convert=_state_path)] = None
    defaults: Annotated[dict, Rule(convert=_backend_defaults)] = field(default_factory=dict)  # type: ignore[type-arg]
    options: Mapping[str, Any] = field(default_factory=dict)


class ModelConfig(Struct, frozen=True):
    """An alias, or rules for one model, or both.

    In a :class:`Config` aliases of aliases are resolved: ``target`` is the name
    backends know (equal to ``name`` for a mere rule), and each limit is the
    smallest on the way, the target's own included, so that no alias evades it.

    :param pin: never evicted, nor unloaded for being idle.
    :param preload: loaded at the start, and again whenever it is gone.
    :param loaded_only: a request never causes a load.
    :param memory_bytes: what it takes in memory, where the backend does not tell.
    :param idle_unload_s: in place of ``loading.idle_unload_s``; 0 is never.
    """

    name: ModelName
    target: Annotated[str, Rule(filled=True)] = ""
    max_tokens: Tokens | None = None
    pin: bool = False
    preload: bool = False
    loaded_only: bool = False
    memory_bytes: Annotated[int, Rule(least=1, most=1 << 50)] | None = None
    idle_unload_s: Annotated[float, Rule(least=1, most=604_800, off=True)] | None = None
    max_prompt_tokens: Tokens | None = None
    max_n: Count | None = None
    max_stop: CountOrNone | None = None
    max_tools: CountOrNone | None = None
    max_logprobs: CountOrNone | None = None
    grammar: bool | None = None
    max_response_bytes: Size | None = None

    @property
    def caps(self) -> Caps:
        """What requests for it may ask."""
        return Caps(**{name: getattr(self, name) for name in Caps.__struct_fields__})
