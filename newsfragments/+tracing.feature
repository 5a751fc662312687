Traces for OpenTelemetry: `[tracing] endpoint`, extra `otel`.
