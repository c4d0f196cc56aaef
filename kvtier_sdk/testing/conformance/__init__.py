"""The conformance kit: every rule of the tiers' contract, and what holds a tier to it."""
