API keys: `llmgw keys new`, `list`, `revoke`. The file holds only hashes; keys may have an expiry, a list of models, and limits of their own.
