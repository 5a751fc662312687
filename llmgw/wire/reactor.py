"""``twistd --reactor=uvloop``: Twisted's asyncio reactor on a uvloop event loop.

Named by the reactor plugin in ``twisted/plugins/llmgw_dropin.py``; Twisted
imports this module only when that reactor was asked for.
"""

from __future__ import annotations


def install() -> None:
    """Make it the process's reactor.

    :raise ImportError: uvloop cannot be imported; ``twistd`` prints the message as a usage error.
    :raise twisted.internet.error.ReactorAlreadyInstalledError: too late.
    """
    try:
        import uvloop
    except ImportError as error:
        raise ImportError(
            f"uvloop cannot be imported ({error}): pip install 'llmgw[fast]', or leave --reactor out"
        ) from error
    from twisted.internet import asyncioreactor

    asyncioreactor.install(uvloop.new_event_loop())
