Files for systemd, containers and Kubernetes, and examples for one box, three boxes, and two gateways with Redis and etcd, in `etc/`.
