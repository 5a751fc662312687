Backends addressed by host name stay reachable for an hour after DNS has stopped answering, and a changed address is noticed within a minute, even under load.
