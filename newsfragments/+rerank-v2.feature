`/v2/rerank`, where Cohere's `ClientV2` asks, is `/v1/rerank` for every backend.
