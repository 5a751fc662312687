Notes for those who come from nginx, HAProxy, llama-swap or LiteLLM.
