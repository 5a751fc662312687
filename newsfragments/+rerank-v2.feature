`/v2/rerank`, which Cohere's `ClientV2` uses, is sent as `/v1/rerank` to every backend.
