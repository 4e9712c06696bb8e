"""One process of a torchtitan job; ``python -m dtensor_muon train`` starts it on every rank."""

import dtensor_muon.titan  # noqa: F401  # before torchtitan: see cpu.prepare_import
from torchtitan.config import ConfigManager  # isort: skip
from torchtitan.train import Trainer, main  # isort: skip


def run() -> None:
    """Train what the command line describes, with torchtitan's own entry point and the model's own trainer."""
    trainer = Trainer
    if ConfigManager().parse_args().model.name == "flux":
        from torchtitan.models.flux.train import FluxTrainer as trainer
    main(trainer)


if __name__ == "__main__":
    run()
