Notes on migrating from nginx, HAProxy, llama-swap or LiteLLM.
