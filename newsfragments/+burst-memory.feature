Memory freed after a burst of requests is returned to the system within seconds.
