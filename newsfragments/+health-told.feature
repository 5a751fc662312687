The log tells when the health of a backend changes, with the reason; a backend that refuses the key of the gateway stands out in the dashboard.
