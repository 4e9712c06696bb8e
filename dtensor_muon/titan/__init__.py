"""Muon in torchtitan 0.2.2: ``[job] custom_config_module = "dtensor_muon.titan"``, ``[optimizer] name = "Muon"``.

torchtitan's configuration manager imports this module while it parses a job. The import registers every built-in
model with a builder that knows Muon, and :class:`JobConfig` adds Muon's options to the ``[optimizer]`` section.
"""

# torchtitan evaluates the annotations below when it merges configurations: they must not become strings.
from dataclasses import dataclass, field, make_dataclass

from dtensor_muon.titan.cpu import prepare_import

prepare_import()

from dtensor_muon.titan.options import OptimizerSection  # noqa: E402
from dtensor_muon.titan.specs import register_all  # noqa: E402

__all__ = ["TRAIN_SPECS", "JobConfig"]

TRAIN_SPECS = register_all()


@dataclass
class JobConfig:
    """What this package adds to torchtitan's configuration."""

    optimizer: OptimizerSection = field(default_factory=OptimizerSection)


if "flux" in TRAIN_SPECS:
    from torchtitan.config import ConfigManager
    from torchtitan.models.flux.job_config import JobConfig as FluxJobConfig

    JobConfig = ConfigManager._merge_configs(FluxJobConfig, JobConfig)
