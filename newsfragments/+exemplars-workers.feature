Exemplars (`[metrics] exemplars`) work with workers too: each bucket has the last request of any worker.
