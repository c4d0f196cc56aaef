"""Forecasts the hits and costs of pools and tiers of many sizes from a trace."""
