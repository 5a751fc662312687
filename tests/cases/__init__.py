"""Hard cases taken from public bug reports, each test named after its id; a package, since names recur elsewhere."""
