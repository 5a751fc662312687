`llmgw register` is a sidecar that keeps a model server in etcd under a lease while it is healthy, with the models, slots and context length that the server reports.
