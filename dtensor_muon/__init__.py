"""Muon for DTensor parameters: exact on every FSDP x TP x EP layout, driven by `redistribute` calls."""

from dtensor_muon.clip import clip_grad_norm_
from dtensor_muon.coefficients import get_supported_coefficient_types, validate_coefficient_type
from dtensor_muon.cost import DeviceProfile
from dtensor_muon.functional import get_muon_scale_factor
from dtensor_muon.fused import FusedDim
from dtensor_muon.layout import ParamLayout, infer_layout
from dtensor_muon.newton_schulz import newton_schulz
from dtensor_muon.optimizer import Muon
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups
from dtensor_muon.registry import OptimizerSpec, get_optimizer, register_optimizer
from dtensor_muon.state import convert_heavy_ball, saved_part

__all__ = [
    "DeviceProfile",
    "FusedDim",
    "Muon",
    "OptimizerSpec",
    "ParamLayout",
    "ParamOverride",
    "build_param_groups",
    "clip_grad_norm_",
    "convert_heavy_ball",
    "describe_param_groups",
    "get_muon_scale_factor",
    "get_optimizer",
    "get_supported_coefficient_types",
    "infer_layout",
    "newton_schulz",
    "register_optimizer",
    "saved_part",
    "validate_coefficient_type",
]
