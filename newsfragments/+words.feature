The dashboard's explanation says whether the lowest or the highest score wins; a backend that refuses connections is reported as such. The fault proxy's command is `python -m llmgw.testing`.
