Backends that are named by host go on being reached for an hour after DNS has stopped answering, and a changed address is noticed within a minute under load too.
