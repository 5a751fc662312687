`make docs` builds the documentation, with a reference of every configuration key, interface and command generated from the code.
