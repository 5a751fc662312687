The log reports when the health of a backend changes, with the reason; a backend that refuses the gateway's key stands out in the dashboard.
