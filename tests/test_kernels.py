"""The optional kernel library: a stand-in for it, since its kernels need a Hopper or Blackwell GPU."""

import sys
import types
import warnings

import pytest
import torch

from dtensor_muon import kernels
from dtensor_muon.symmetric import gram_matrix, symmetric_multiply_add


@pytest.fixture
def install(monkeypatch):
    """Installs a fake quack whose gemm_symmetric is the given function, on a CPU that counts as supported."""

    def install_kernel(gemm_symmetric):
        module = types.ModuleType("quack.gemm_interface")
        module.gemm_symmetric = gemm_symmetric
        package = types.ModuleType("quack")
        package.__spec__ = types.SimpleNamespace(name="quack")
        monkeypatch.setitem(sys.modules, "quack", package)
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
        monkeypatch.setattr(kernels, "is_supported_device", lambda device: True)

    kernels._load.cache_clear()
    yield install_kernel
    kernels._load.cache_clear()


def product(A, B, C=None, *, out, alpha=1.0, beta=1.0):
    result = alpha * A.float() @ B.float() + (0 if C is None else beta * C.float())
    out.copy_(result)


def test_installed_kernel_is_used_and_agrees(install):
    calls = []
    install(lambda *args, **kwargs: calls.append(kwargs) or product(*args, **kwargs))
    x = torch.randn(2, 300, 64).to(torch.bfloat16)
    gram = gram_matrix(x, out=torch.empty(2, 300, 300, dtype=torch.bfloat16))
    square = symmetric_multiply_add(gram, gram, gram, beta=0.5, alpha=2e-3, out=torch.empty_like(gram))
    assert len(calls) == 3  # the trial when it is loaded, and two products
    kernels._load.cache_clear()
    sys.modules.pop("quack")
    wanted = (0.5 * gram.float() + 2e-3 * gram.float() @ gram.float()).to(torch.bfloat16)
    # one bf16 rounding of the result
    assert torch.allclose(square.float(), wanted.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no driver")), "OSError: no driver"),
        (lambda A, B, C, *, out, alpha, beta: out.zero_(), "its result differs from torch's"),
    ],
)
def test_unusable_kernel_warns_once_and_torch_multiplies(install, broken, reason):
    install(broken)
    x = torch.randn(300, 64).to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gram = gram_matrix(x, out=torch.empty(300, 300, dtype=torch.bfloat16))
    assert [reason in str(warning.message) for warning in caught] == [True]
    assert torch.allclose(gram.float(), x.float() @ x.float().mT, rtol=2**-7, atol=0.1)


def test_without_the_library_nothing_is_said(install, monkeypatch):
    monkeypatch.setattr(kernels, "is_supported_device", lambda device: True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.symmetric_kernel(torch.zeros(300, 64, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("x", [torch.zeros(300, 64), torch.zeros(10, 64, dtype=torch.bfloat16)])
def test_fp32_and_small_matrices_never_use_it(install, x):
    install(product)
    assert kernels.symmetric_kernel(x) is None
