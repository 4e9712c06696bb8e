"""`python -m dtensor_muon bench`: times optimizer steps on this machine."""
