"""The conformance kit: a check of a tier for every rule of the contract."""
