`llmgw.testing.FaultProxy` (`python -m llmgw.testing`) sits in front of a server and refuses, stalls, cuts, resets, corrupts or slows its connections at any byte.
