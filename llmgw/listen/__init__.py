"""Listeners of our own kind: TLS that can be reloaded, and the PROXY protocol from listed networks.

The parameters of their endpoint strings stand here, for the configuration, which
imports no Twisted.
"""

TLS_PARAMETERS = ("privateKey", "certKey", "certs", "clientCA", "clientCerts", "minimum")
PROXIED_PARAMETERS = ("networks",)
