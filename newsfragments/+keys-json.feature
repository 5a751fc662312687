`llmgw keys new` and `llmgw keys revoke` have `--json`.
