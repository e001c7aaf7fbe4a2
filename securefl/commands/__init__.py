"""The commands over keys, ledgers and one silo; each module adds its own with `register`."""
