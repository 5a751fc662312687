The log says what a drain waits for, and what is cut at its end.
