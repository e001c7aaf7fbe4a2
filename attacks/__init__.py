"""The auditor: attacks on what a run released, scored on the truth that is held apart."""
