Gateways and workers that share a store tell each other of their requests at work and of open breakers, and keep to the caps of backends
together. Workers without a configured store get one of their own (extra `workers`).
