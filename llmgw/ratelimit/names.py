"""What limits are called in the store: no key's id stands there."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmgw.store.store import Store
    from llmgw.values import Policy


class Names:
    """Those of one store, the same for every gateway that uses it."""

    def __init__(self, store: Store) -> None:
        password = store.config.password
        self._prefix = store.key("rl")
        self._secret = b"llmgw" if password is None else password.reveal().encode()

    def of(self, policy: Policy, subject: str) -> tuple[str, str, str]:
        """Where ``policy`` counts requests, tokens and places of ``subject``."""
        # A key's own policies are called after its id, which is nobody's business in the store.
        name = "own" if policy.name.startswith("keys.") else policy.name
        digest = "all"
        if policy.scope != "global":
            digest = hmac.new(self._secret, subject.encode(), hashlib.sha256).hexdigest()[:16]
        key = f"{self._prefix}:{{{digest}}}:{name}"
        return f"{key}:requests", f"{key}:tokens", f"{key}:concurrent"
