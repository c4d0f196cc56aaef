"""The conformance kit: one check of a tier for each rule of the contract."""
