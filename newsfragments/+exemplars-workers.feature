Exemplars (`[metrics] exemplars`) are told by gateways with workers, too: of each bucket the last request of any worker.
