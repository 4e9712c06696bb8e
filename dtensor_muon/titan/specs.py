"""torchtitan's built-in models, registered again with Muon among their optimizers."""

import dataclasses
import importlib
from typing import Any

from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.gpt_oss import GptOssModelArgs
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import logger

from dtensor_muon.titan import corpus
from dtensor_muon.titan.cpu import cure_train_spec
from dtensor_muon.titan.optimizers import muon_builder, muon_lr_schedulers_builder

# Sized for two CPU cores.
_MOE = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, score_func="softmax", score_before_experts=False)
_TINY = (
    TransformerModelArgs(
        dim=64, n_layers=2, n_heads=4, vocab_size=corpus.VOCAB_SIZE, multiple_of=64, rope_theta=10000
    ),
    DeepSeekV3ModelArgs(
        dim=64, n_layers=3, n_dense_layers=1, n_heads=4, vocab_size=corpus.VOCAB_SIZE, inter_dim=128, moe_inter_dim=64,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        moe_args=dataclasses.replace(_MOE, num_shared_experts=1),
    ),
    GptOssModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=corpus.VOCAB_SIZE, moe_inter_dim=64,
        moe_args=dataclasses.replace(_MOE, gate_bias=True, route_norm=True),
    ),
    Qwen3ModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=corpus.VOCAB_SIZE, hidden_dim=128,
        moe_enabled=True, moe_inter_dim=64, moe_args=dataclasses.replace(_MOE, route_norm=True),
    ),
)  # fmt: skip
TINY = {type(args): args for args in _TINY}


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
    if tiny := TINY.get(type(model_args.get("debugmodel"))):
        model_args["tiny"] = tiny
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
