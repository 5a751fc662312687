"""Authentication: ``twisted.cred`` checkers and the key file (``docs/keys.md``).

The gateway asks a checker for an avatar id and then for the
:class:`~llmgw.values.Caller` behind it. ``keys`` is ours; ``anonymous`` is
Twisted's; any other checker is a plugin of the kind ``strcred.ICheckerFactory``.
"""
