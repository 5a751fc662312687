`llmgw check` asks every `[[discovery]]` too: what it names, whether it can be reached, which entries would not be served; and the backends that it names as
those of the file.
