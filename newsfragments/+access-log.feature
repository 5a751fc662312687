An access log of one JSON object a line, without prompts, answers or keys (`[log] access`). SIGHUP opens the file anew after it was moved away.
