"""Decisions without I/O, clock or Twisted: time, bytes and dice are arguments."""
