`llmgw.testing.FaultProxy` (`python -m llmgw.testing`) stands before a server and refuses, stalls, cuts, resets, garbles or slows its connections at any byte.
