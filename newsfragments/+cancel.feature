A client that leaves frees its slot at once. Calls that are not streamed go to llama-server as streams and are put together again, so that this holds for them too; `raw = true` turns it off.
