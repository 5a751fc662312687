A stream event that only adds a piece of text takes a third less of the gateway's own Python time.
