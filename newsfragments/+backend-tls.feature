`[backends.tls] cert_file` and `key_file`: a client certificate for backends that ask for one. A reload reads these and `ca_file` again; a `ca_file` without a certificate is refused.
