"""Where backends are learnt from: one module a source, each a plugin."""
