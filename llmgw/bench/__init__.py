"""Measuring real servers from outside: loads, callers, and gateways to compare."""
