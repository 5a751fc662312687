`llmgw replay` without `--fleet-from` says so if the log was written by another fleet than the one it simulates, so that nobody compares the two.
