A client that disconnects frees its slot at once. Calls without streaming are sent to llama-server as streams and reassembled, so that this holds for them too; `raw = true` turns that off.
