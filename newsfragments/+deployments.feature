Files for systemd, containers and Kubernetes, and examples for one machine, three machines, and two gateways with Redis and etcd, in `etc/`.
