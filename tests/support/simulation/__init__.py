"""Simulations of the manager over faulty tiers on virtual time, each determined by a seed."""

from support.simulation.breach import Breach
from support.simulation.report import SimulationReport
from support.simulation.soak import soak
from support.simulation.world import simulate

__all__ = ["Breach", "SimulationReport", "simulate", "soak"]
