Alert rules for Prometheus (`etc/prometheus/`, with tests for promtool) and a dashboard for Grafana (`etc/grafana/`). `llmgw_store_up` is absent if there is no store.
