"""Forecasts what pools and tiers of many sizes would hit and cost, from a trace."""
