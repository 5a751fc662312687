"""Request filters: what may be asked at all, one file each."""
