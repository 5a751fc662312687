`llmgw_panic_choices` counts choices made in panic, when less than half of a pool is left and ejections are ignored; with an alert rule.
