import pytest
import torch
from numerics import CountFlops

from dtensor_muon.symmetric import gram_matrix, panels, symmetric_flops, symmetric_multiply_add

ROWS = [1, 100, 256, 301, 512, 1030]


def exact_gram(rows: int, cols: int) -> torch.Tensor:
    """Integers, so that every product and sum is exact in fp32."""
    return torch.randint(-3, 4, (rows, cols), generator=torch.Generator().manual_seed(rows)).float()


def test_panels():
    assert panels(255, "cpu") == ((0, 255),)
    assert panels(257, "cpu") == ((0, 128), (128, 257))
    assert len(panels(512, "cpu")) == 4
    assert len(panels(1 << 20, "cpu")) == 8
    assert len(panels(2047, "cuda")) == 1
    assert len(panels(2048, "cuda")) == 2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gram_matrix_is_the_full_product(rows, batch):
    x = exact_gram(rows, rows + 7).expand(*batch, -1, -1)
    out = torch.empty(*batch, rows, rows)
    with CountFlops() as count:
        gram_matrix(x, out=out)
    assert torch.equal(out, x @ x.mT)
    assert count.flops == symmetric_flops(rows, rows + 7, "cpu") * (batch[0] if batch else 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_multiply_add_is_the_full_product(rows, batch):
    x = exact_gram(rows, 5)
    a = (x @ x.mT).expand(*batch, -1, -1)
    out = torch.empty(*batch, rows, rows)
    symmetric_multiply_add(a, a, a, beta=3.0, alpha=0.5, out=out)
    torch.testing.assert_close(out, 3 * a + 0.5 * a @ a, rtol=1e-6, atol=1e-2)
    assert torch.equal(out, out.mT)


def test_the_mirrored_half_is_not_read():
    x = torch.randn(512, 600, generator=torch.Generator().manual_seed(0))
    out = torch.full((512, 512), float("nan"))
    gram_matrix(x, out=out)
    torch.testing.assert_close(out, x @ x.mT, rtol=0, atol=1e-3)


def test_flops_fall_to_five_eighths_with_four_panels():
    assert symmetric_flops(512, 512, "cpu") == 2 * 512**3 * 5 // 8
