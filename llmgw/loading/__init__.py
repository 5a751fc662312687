"""Model loaders: plugins that load and unload models on one backend."""
