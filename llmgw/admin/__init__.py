"""The operator's side: metrics, probes, state. Ordinary ``twisted.web``."""
