When many requests arrive at once, sixteen begin per iteration of the event loop: running streams wait less, and 1,000 streams that begin together take 9.7 KiB each instead of 12 to 15.
