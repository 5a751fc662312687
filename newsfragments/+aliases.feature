Model aliases, with a ceiling on output tokens (`[[models]]`).
