"""Muon for DTensor parameters."""
