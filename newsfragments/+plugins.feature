Routers, health sources, rate limiters and credentials checkers of other packages are found once installed, and listed by `llmgw plugins`; `llmgw.testing` has contract tests for them.
