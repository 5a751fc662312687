A running stream takes a third less memory: 9 KiB.
