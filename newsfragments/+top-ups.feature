A stream that outgrows the tokens reserved for it is charged for them while it runs, 256 at a time, not only at its end; limiter plugins may have `top_up`.
