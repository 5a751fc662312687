`llmgw register` is a side-car that keeps a model server in etcd under a lease while it is well, with the models, slots and context length that the server tells.
