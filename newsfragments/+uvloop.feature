`twistd --reactor=uvloop` runs the gateway on uvloop (extra `fast`).
