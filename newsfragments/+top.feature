`llmgw top` shows the fleet of a running gateway live in a terminal, `llmgw explain` who would take a request now and why; both with `--json`.
