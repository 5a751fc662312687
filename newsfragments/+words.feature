The dashboard's explanation says whether the least or the most score wins; a backend where nobody listens is told as that. The fault proxy's command is `python -m llmgw.testing`.
