"""Muon in torchtitan 0.2.2: ``[job] custom_config_module = "dtensor_muon.titan"``, ``[optimizer] name = "Muon"``.

torchtitan's configuration manager imports this module while it parses a job. The import registers every built-in
model with a builder that knows Muon, and ``JobConfig`` adds Muon's options to the ``[optimizer]`` section.
"""

import dataclasses

from dtensor_muon.titan.cpu import prepare_import

prepare_import()

from dtensor_muon.titan.options import OptimizerSection  # noqa: E402
from dtensor_muon.titan.specs import register_all  # noqa: E402

__all__ = ["TRAIN_SPECS", "JobConfig"]

TRAIN_SPECS = register_all()

# Generated, because torchtitan merges annotations that are types, and drops the methods of hand-written classes.
JobConfig = dataclasses.make_dataclass(
    "JobConfig", [("optimizer", OptimizerSection, dataclasses.field(default_factory=OptimizerSection))]
)

if "flux" in TRAIN_SPECS:
    from torchtitan.config import ConfigManager
    from torchtitan.models.flux.job_config import JobConfig as FluxJobConfig

    JobConfig = ConfigManager._merge_configs(FluxJobConfig, JobConfig)
