"""The shared store: what gateways tell each other, in a Redis or Valkey.

:class:`Store` is one connection to one server, with every wait bounded::

    store = Store(StoreConfig("redis://127.0.0.1/0"), reactor)   # or service.store, ready made
    store.start()
    await store.command("SET", store.key("hello"), "world", "PX", 500)
    await store.run(SCRIPT, [store.key("lock")], [token, 2000])   # SCRIPT = Script("return …")

Rules for whoever uses it:

- **Nothing waits for a connection.** While the store is down, ``run`` and
  ``command`` fail at once with :class:`StoreDown`; look at ``store.up`` first where
  the failure would cost more than the look, and go on with what you know.
- **Nothing waits long for an answer**: ``op_s`` (50 ms), then :class:`StoreLost`:
  it may or may not have been done. Make what you send safe to repeat, or let it expire.
- **Everything expires.** A gateway may die at any time: whatever it writes has a
  TTL (``PX``, ``PEXPIRE``) after which the others may go on without it.
- **Redis' clock, not ours**: times that gateways compare are taken by ``TIME`` in
  a script; hosts disagree.
- **Scripts answer with integers or one string.** txredisapi spends a turn of the
  reactor on each string of a list.
- Keys come from :meth:`Store.key`, which puts ``key_prefix`` before them.

It is never part of readiness: a gateway without its store is a gateway that
works by itself. The classes are in :mod:`llmgw.store.store` and
:mod:`llmgw.store.errors`; the configuration is ``[store]``
(:class:`llmgw.config.StoreConfig`).
"""
