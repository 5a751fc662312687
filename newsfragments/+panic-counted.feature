`llmgw_panic_choices` counts choices made in panic, when under half of a pool is left and ejections are ignored; with an alert rule.
