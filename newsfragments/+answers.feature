`[answers] show_backend` and `show_decision` put `x-llmgw-backend` and `x-llmgw-decision` on every answer.
