"""torchtitan's built-in models, registered again with Muon among their optimizers."""

import dataclasses
import importlib
from typing import Any

from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import logger

from dtensor_muon.titan import corpus
from dtensor_muon.titan.cpu import cure_train_spec
from dtensor_muon.titan.optimizers import muon_builder, muon_lr_schedulers_builder

# Sized for two CPU cores.
TINY_LLAMA3 = TransformerModelArgs(
    dim=64, n_layers=2, n_heads=4, vocab_size=corpus.VOCAB_SIZE, multiple_of=64, rope_theta=10000
)


def register_all() -> dict[str, TrainSpec]:
    """Register every built-in model whose own dependencies are installed, and the Python-sources dataset.

    Returns:
        The registered specs by model name.
    """
    specs = {}
    for name in sorted(_supported_models):
        try:
            module = importlib.import_module(f"torchtitan.models.{name}")
        except ImportError as error:
            logger.info(f"Model {name} is not available with Muon: {error}")
            continue
        specs[name] = extend_train_spec(module.get_train_spec())
        register_train_spec(name, specs[name])
    DATASETS[corpus.DATASET] = DatasetConfig(
        path=str(corpus.default_folder()), loader=corpus.load, sample_processor=lambda sample: sample["text"]
    )
    return specs


def extend_train_spec(spec: TrainSpec) -> TrainSpec:
    """``spec`` with Muon as a further optimizer, everything else unchanged; on CPU also the cures it needs."""
    model_args = dict(spec.model_args)
    if isinstance(model_args.get("debugmodel"), TransformerModelArgs):
        model_args["tiny"] = TINY_LLAMA3
    extended = dataclasses.replace(
        spec,
        model_args=model_args,
        build_optimizers_fn=muon_builder(spec.build_optimizers_fn),
        build_lr_schedulers_fn=muon_lr_schedulers_builder(spec.build_lr_schedulers_fn),
        build_tokenizer_fn=_prepare_corpus_first(spec.build_tokenizer_fn),
    )
    cured: TrainSpec = cure_train_spec(extended)
    return cured


def _prepare_corpus_first(build_tokenizer: Any) -> Any:
    if build_tokenizer is None:
        return None

    def build(job_config: Any) -> Any:
        if job_config.training.dataset == corpus.DATASET:
            corpus.prepare(job_config.training.dataset_path)
        return build_tokenizer(job_config)

    return build
