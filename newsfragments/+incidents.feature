A troubleshooting page: symptoms, where to look, what to do.
