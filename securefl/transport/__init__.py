"""How bytes move between server and silos. A transport is trusted with nothing: it sees sealed envelopes."""
