"""One request's way through the gateway."""
