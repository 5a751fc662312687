API keys: `llmgw keys new`, `list`, `revoke`. The file holds hashes only; keys may have an expiry, models they are for, and limits of their own.
