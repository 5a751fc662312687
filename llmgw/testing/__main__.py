"""``python -m llmgw.testing``: the fault proxy as a command."""

from llmgw.testing.faults import main

if __name__ == "__main__":
    main()
