Request filters are a new kind of plugin (`[[filters]]`): they see each request before it is charged and may refuse it. The built-in `deny-pattern` refuses words and RE2 patterns (extra `filters`).
