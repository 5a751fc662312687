An access log with one JSON object per line, without prompts, answers or keys (`[log] access`). SIGHUP reopens the file after rotation.
