"""What a value in the configuration may be, where more than one key is of that kind."""

from __future__ import annotations

from typing import Annotated

from llmgw.config.reader import Rule

Seconds = Annotated[float, Rule(above=0, most=604_800)]
Count = Annotated[int, Rule(least=1, most=1_000_000_000)]
CountOrNone = Annotated[int, Rule(least=0, most=1_000_000_000)]
Size = Annotated[int, Rule(least=256, most=1 << 40)]
Share = Annotated[float, Rule(least=0, most=1)]
Tokens = Annotated[int, Rule(least=1, most=1_000_000_000)]
Word = Annotated[str, Rule(shape=r"[A-Za-z0-9._:-]{1,128}", meaning="letters, digits, . _ : - (at most 128)")]
ModelName = Annotated[str, Rule(shape=r"[^\x00-\x1f\x7f]{1,256}", meaning="1 to 256 printable characters")]
