`llmgw replay` without `--fleet-from` says when the log was written by another fleet than the one that it simulates, so that nobody compares the two.
