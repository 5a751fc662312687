"""Fixtures of all tests, each kind in a module of its own, and what holds for all properties."""

from hypothesis import settings

pytest_plugins = ["pytester", "lost_errors", "real_servers", "live_gateway", "redis_servers", "real_etcd"]

# That a machine is busy with other work says nothing of a property.
settings.register_profile("llmgw", deadline=None)
settings.load_profile("llmgw")
