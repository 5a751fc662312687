Gateways that share an etcd tell each other which models they let run out, as those with a store do; `llmgw check` says when gateways behind a balancer share neither.
