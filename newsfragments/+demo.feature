`make run` (`llmgw demo`) starts three real llama.cpp servers of different speeds with a gateway in front, without a model to download.
