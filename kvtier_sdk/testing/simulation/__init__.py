"""Simulation: the whole manager over faulty tiers on virtual time, decided by a seed."""

from kvtier_sdk.testing.simulation.breach import Breach
from kvtier_sdk.testing.simulation.report import SimulationReport
from kvtier_sdk.testing.simulation.soak import soak
from kvtier_sdk.testing.simulation.world import simulate

__all__ = ["Breach", "SimulationReport", "simulate", "soak"]
