"""One process of a torchtitan job; ``python -m dtensor_muon train`` starts it on every rank."""

import dtensor_muon.titan  # noqa: F401  # must come before torchtitan, see cpu.prepare_import

from torchtitan.config import ConfigManager
from torchtitan.train import Trainer, main


def run() -> None:
    """Train what the command line describes, with torchtitan's own entry point."""
    main(Trainer)


if __name__ == "__main__":
    run()
