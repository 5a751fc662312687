A plugin whose `choose`, `check`, `settle`, `start` and the like are written with `async def`, or as generators, is refused at start and by `llmgw check`, in
words; before, they were called and nothing happened.
