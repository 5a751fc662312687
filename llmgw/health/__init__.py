"""Health sources: plugins that watch one backend each and report facts."""
