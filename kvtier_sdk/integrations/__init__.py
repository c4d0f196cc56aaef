"""Engines that the SDK runs under, one package each."""
