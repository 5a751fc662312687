"""A fleet of llama-servers that exists only on paper, to try routers on.

The entry point is :func:`llmgw.simulation.run.simulate`::

    from llmgw.routing.adaptive import Adaptive
    from llmgw.simulation.fleets import article_fleet
    from llmgw.simulation.report import summary
    from llmgw.simulation.run import Settings, simulate
    from llmgw.simulation.workload import mixed

    fleet = article_fleet()
    load = mixed(seed=1, count=2000, fleet=fleet, load=0.7)
    result = simulate(load, fleet, lambda seed: Adaptive.from_options({}), Settings(cap="none"))
    print(summary(result))

The router is any object with ``choose`` and ``observe`` (``llmgw.interfaces.IRouter``).
It is driven by the gateway's own :class:`llmgw.core.fleet.Fleet`: the caps, leases,
profiles, breakers and retry budget are not modelled but used.

Everything here is pure and seeded: the same arguments give the same figures on
every machine. Nothing imports Twisted.
"""
