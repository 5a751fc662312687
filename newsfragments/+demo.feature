`make run` (`llmgw demo`) starts three real llama.cpp servers of unlike speed with a gateway before them, without a model to download.
