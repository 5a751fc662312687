`llmgw top` shows the fleet of a running gateway live in a terminal, `llmgw explain` which backend would take a request now and why; both with `--json`.
