"""The parts of ``llmgw demo``: a small fleet of unlike servers on one machine.

Each module is one part and can be used alone: :mod:`.tiny_gguf` writes a model
file, :mod:`.llama_server` serves it with the real llama.cpp server,
:mod:`.simulated` stands in where that does not run, :mod:`.duty` makes a server
slower, :mod:`.certificate` makes a certificate, :mod:`.processes` starts and
ends all of them, :mod:`.layout` knows which file lies where.
``llmgw.commands.demo`` puts them together.
"""
