Keys and `[[models]]` may cap what a single request asks for: `max_prompt_tokens`, `max_tokens`, `max_n`, `max_stop`, `max_tools`, `max_logprobs`, `grammar`, `max_response_bytes`.
