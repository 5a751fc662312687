`[metrics] exemplars` names a request, or its trace, beside each bucket of `llmgw_ttft_seconds`, in OpenMetrics.
