Routers, health sources, rate limiters and credentials checkers of other packages are found once they are installed, and listed by `llmgw plugins`; `llmgw.testing` proves them.
