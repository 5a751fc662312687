What a burst of requests has freed goes back to the system within seconds of its end.
