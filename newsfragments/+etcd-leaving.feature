Gateways that share an etcd tell each other which models they are about to evict, as those with a store do; `llmgw check` says so when gateways behind a load balancer share neither.
