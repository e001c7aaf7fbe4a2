"""Long hunts for inputs that securefl does not refuse in its own words; `make fuzz` runs them."""
