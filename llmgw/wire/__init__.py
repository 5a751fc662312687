"""Bytes on Twisted: servers, connections to backends, relay, TLS, reactor."""
