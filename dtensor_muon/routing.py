"""The default rules: which parameters Muon must not get, from module types, names and global shapes alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

ROUTER = "router"
CONVOLUTION = "convolution"
OTHER_STACK = "neither a matrix nor a stack of experts"

# Of an image: gray, RGB, RGBA; also of the usual image latents.
_MAX_IMAGE_CHANNELS = 4

# Wrappers that put a component of their own into parameter names; checkpoints do not carry it.
_WRAPPER_COMPONENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

# [Note: routing by name]
# Patterns below are matched against the dotted path of the module that owns a parameter, "layers.0.attention.wq". A
# component made of digits means "one of many blocks". A word that is only clear at the ends of a network ("output",
# "head") must not stand inside a block, where the same word names an ordinary projection; a word that contains other
# blocks ("embeddings.layers.0.mlp") says nothing about what is inside them. What hangs below a matching module without
# a block between, such as "lm_head.lora_A.default", follows it.
_WORD = r"[^.\d][^.]*"
_BEFORE_BLOCKS = rf"^(?:{_WORD}\.)*"
_AFTER_BLOCKS = rf"(?:\.{_WORD})*(?:\.\d+)?$"

_NORM_CLASS = re.compile(r"Norm(?:\d?d)?$")
_EMBEDDING_CLASS = re.compile(r"Embed(?:ding|dings|der)?$")
_EMBEDDING_PATH = re.compile(rf"(?:^|\.)(?:\w+_)?(?:wte|wpe|emb|embed|embedder|embeddings?)(?:_\w+)?{_AFTER_BLOCKS}")
_INPUT_PATH = re.compile(rf"{_BEFORE_BLOCKS}(?:img|txt)_in{_AFTER_BLOCKS}")
_OUTER_CONVOLUTION_PATH = re.compile(r"^(?:[^.\d]+\.)*(?:conv_in$|conv_out$|conv1$|stem(?:\.|$)|decoder(?:\.\d+)?$)")
_LEARNED_INPUT_LEAF = re.compile(r"embed|pos_emb|position|(?:^|_)tokens?$")
_HEAD_PATH = re.compile(
    r"(?:^|\.)(?:lm_heads?|shared_head|unembed(?:ding)?|output_layer)(?:\.|$)"
    rf"|{_BEFORE_BLOCKS}(?:output|heads?|classifier|score|qa_outputs|proj_out|final_layer\.linear){_AFTER_BLOCKS}"
)
_BIAS_LEAF = re.compile(r"(?:^|_)bias(?:es)?(?:_|\d|$)|^b\d+$")
_ROUTER_CLASS = re.compile(r"Router$")
_ROUTER_PATH = re.compile(r"(?:^|\.)(?:router|(?:shared_)?experts?_gate)(?:\.|$)")
_EXPERT = re.compile(r"expert", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a parameter is registered.

    Attributes:
        name: Canonical parameter name.
        path: Canonical path of the owning module.
        leaf: Name of the parameter in its module.
        lineage: `(component, module)` from below the root to the owning module, wrappers left out.
        owner: The owning module.
    """

    name: str
    path: str
    leaf: str
    lineage: tuple[tuple[str, nn.Module], ...]
    owner: nn.Module


def canonical_name(name: str) -> str:
    """Removes the components that activation checkpointing, `torch.compile` and FSDP wrappers put into a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def find_parameters(model: nn.Module) -> list[tuple[list[Site], nn.Parameter]]:
    """Every trainable parameter once, in registration order, with all places where it is registered."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[list[Site], nn.Parameter]] = {}
    for raw_name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            found.setdefault(id(param), ([], param))[0].append(_site(raw_name, modules))
    return list(found.values())


def convolution_groups(sites: Sequence[Site], param: nn.Parameter) -> int | None:
    """The number of groups of a convolution whose weight this is; None when it is no such weight."""
    groups = (site.owner.groups for site in sites if isinstance(site.owner, _ConvNd) and param.ndim > 2)
    return next(groups, None)


def _site(raw_name: str, modules: Mapping[str, nn.Module]) -> Site:
    *components, leaf = raw_name.split(".")
    raw_paths = [".".join(components[: depth + 1]) for depth in range(len(components))]
    lineage = tuple(
        (component, modules[raw_path])
        for component, raw_path in zip(components, raw_paths, strict=True)
        if component not in _WRAPPER_COMPONENTS
    )
    return Site(
        name=canonical_name(raw_name),
        path=".".join(component for component, _ in lineage),
        leaf=leaf,
        lineage=lineage,
        owner=modules[".".join(components)],
    )


def _class_matches(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    # a subclass of a norm or an embedding is one, whatever its name
    return any(pattern.search(cls.__name__) for cls in type(module).__mro__)


def _is_norm(site: Site, param: nn.Parameter) -> bool:
    return _class_matches(site.owner, _NORM_CLASS)


def _is_bias(site: Site, param: nn.Parameter) -> bool:
    return _BIAS_LEAF.search(site.leaf) is not None


def _is_vector_per_expert(site: Site, param: nn.Parameter) -> bool:
    if param.ndim != 2:
        return False
    siblings = site.owner.parameters(recurse=False)
    return _in_experts(site) and any(other.ndim == 3 and other.shape[0] == param.shape[0] for other in siblings)


def _is_embedding(site: Site, param: nn.Parameter) -> bool:
    if isinstance(site.owner, (nn.Embedding, nn.EmbeddingBag)) or _EMBEDDING_PATH.search(site.path):
        return True
    # an embedder's own layers count, the numbered blocks of a model named after embeddings do not
    for component, module in reversed(site.lineage):
        if component.isdigit():
            return False
        if _class_matches(module, _EMBEDDING_CLASS):
            return True
    return False


def _is_learned_input(site: Site, param: nn.Parameter) -> bool:
    return _LEARNED_INPUT_LEAF.search(site.leaf) is not None


def _is_input_projection(site: Site, param: nn.Parameter) -> bool:
    return _INPUT_PATH.search(site.path) is not None


def _is_head(site: Site, param: nn.Parameter) -> bool:
    return _HEAD_PATH.search(site.path) is not None


def _is_router(site: Site, param: nn.Parameter) -> bool:
    if _ROUTER_PATH.search(site.path) or any(_class_matches(module, _ROUTER_CLASS) for _, module in site.lineage):
        return True
    # "gate" alone is also an ordinary projection: it routes only beside experts
    return any(
        component == "gate" and any(_EXPERT.search(name) for name, _ in parent.named_children())
        for (component, _), (_, parent) in zip(site.lineage[1:], site.lineage, strict=False)
    )


def _is_outer_convolution(site: Site, param: nn.Parameter) -> bool:
    if not isinstance(site.owner, _ConvNd):
        return False
    reads_or_writes_images = min(site.owner.in_channels, site.owner.out_channels) <= _MAX_IMAGE_CHANNELS
    return reads_or_writes_images or _OUTER_CONVOLUTION_PATH.search(site.path) is not None


def _is_convolution(site: Site, param: nn.Parameter) -> bool:
    return isinstance(site.owner, _ConvNd)


def _is_other_stack(site: Site, param: nn.Parameter) -> bool:
    if isinstance(site.owner, _ConvNd):
        return False
    return param.ndim > 3 or (param.ndim == 3 and not _in_experts(site))


def _in_experts(site: Site) -> bool:
    return any(_EXPERT.search(component) or _class_matches(module, _EXPERT) for component, module in site.lineage)


Rule = Callable[[Site, nn.Parameter], bool]

# What keeps a parameter from Muon, in the order in which the reason is reported.
RULES: tuple[tuple[str, Rule], ...] = (
    ("use_muon=False", lambda site, param: not getattr(param, "use_muon", True)),
    ("is_embedding_or_output_parameter", lambda site, param: getattr(param, "is_embedding_or_output_parameter", False)),
    ("fewer than two dims", lambda site, param: param.ndim < 2),
    ("norm", _is_norm),
    ("bias", _is_bias),
    ("one vector per expert", _is_vector_per_expert),
    ("embedding", _is_embedding),
    ("learned position or token", _is_learned_input),
    ("input projection", _is_input_projection),
    ("output head", _is_head),
    (ROUTER, _is_router),
    ("input or output convolution", _is_outer_convolution),
    (CONVOLUTION, _is_convolution),
    (OTHER_STACK, _is_other_stack),
)


def why_adamw(sites: Sequence[Site], param: nn.Parameter, router_to_muon: bool, flatten: bool = False) -> str:
    """The first rule that keeps a parameter from Muon, "" when there is none.

    A tied weight is kept from Muon when any of its places says so.

    Args:
        sites: All places where the parameter is registered.
        param: The parameter.
        router_to_muon: Whether routers are no reason.
        flatten: Whether being a convolution is none, because its weight is seen as a matrix.
    """
    for reason, rule in RULES:
        if (reason == ROUTER and router_to_muon) or (reason == CONVOLUTION and flatten):
            continue
        if any(rule(site, param) for site in sites):
            return reason
    return ""
