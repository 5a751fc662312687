"""Hard cases taken from public bug reports, each test named after its id.

A package, since file names recur elsewhere in the tree.
"""
