The gateway runs as a `twistd` plugin: `twistd -n llmgw -c llmgw.toml`, or without a file with `--listen` and `--backend`. `--check` and `llmgw check` report every fault of a configuration at once.
