Health source `prometheus`: load, queue, KV cache and GPU use from a Prometheus page of the backend or of an exporter beside it (vLLM, SGLang, llama-server, DCGM, or any metric names you choose).
