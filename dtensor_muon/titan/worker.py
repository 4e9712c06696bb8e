"""One process of a torchtitan job; ``python -m dtensor_muon train`` starts it on every rank."""

import dtensor_muon.titan  # noqa: F401  # before torchtitan itself, see cpu.prepare_import


def run() -> None:
    """Train what the command line describes, with torchtitan's entry point and the model's own trainer."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer, main

    if ConfigManager().parse_args().model.name == "flux":
        from torchtitan.models.flux.train import FluxTrainer

        main(FluxTrainer)
    else:
        main(Trainer)


if __name__ == "__main__":
    run()
