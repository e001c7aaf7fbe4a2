"""The mathematics of the federated methods: functions of arrays and models.

Nothing here draws from a global generator, reads or writes files, or knows about keys, silos' policies or
transports; what a method may send is decided elsewhere.
"""
