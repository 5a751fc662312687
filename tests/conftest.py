"""Fixtures of all tests, each kind in a module of its own."""

pytest_plugins = ["pytester", "lost_errors", "real_servers", "live_gateway", "redis_servers", "real_etcd"]
