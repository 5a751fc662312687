Names of your own for models, with a ceiling on output tokens (`[[models]]`).
