"""Keys, signatures and sealed envelopes, on the primitives of `cryptography`.

`identity` holds who signs and who can open; `envelope` the one byte format that travels (WIRE.md). Nothing
here knows models, rows or policies.
"""
