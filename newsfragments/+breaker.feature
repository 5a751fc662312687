A backend that fails is left alone, tried again with single requests, and warmed up (`[breaker]`). While no byte has gone to the client, another backend is tried, within a budget (`[retry]`).
