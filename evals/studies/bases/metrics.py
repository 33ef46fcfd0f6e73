"""How well a basis holds tokens: energy left over, overlap, spectrum, cosine. Pure functions of NumPy arrays.

Every metric keeps the leading axes (layer, head) apart. Second moments C = sum x x^T suffice for all
energies: tr(U^T C U) / tr(C) needs no tokens.
"""

import numpy as np


def second_moment(x: np.ndarray) -> np.ndarray:
    """C = X^T X, float64 `[..., W, W]`, of tokens `[..., T, W]`."""
    x = np.asarray(x, np.float64)
    return x.swapaxes(-1, -2) @ x


def residual_energy_ratio(moment: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """RER = ||X - X U U^T||^2 / ||X||^2 (OjaKV, section 4), `[...]` in [0, 1]; 0 where X is 0.

    Args:
        moment: `[..., W, W]`, second moments of X.
        basis: `[..., W, R]`; columns that rounding has left a little off orthonormal are accounted for:
            ||X - X U U^T||^2 = tr C - 2 tr(U^T C U) + tr(U^T C U U^T U).
    """
    c, u = np.asarray(moment, np.float64), np.asarray(basis, np.float64)
    held = u.swapaxes(-1, -2) @ c @ u
    total = np.trace(c, axis1=-2, axis2=-1)
    overlap = np.einsum("...rp,...pr->...", held, u.swapaxes(-1, -2) @ u)
    left = total - 2 * np.trace(held, axis1=-2, axis2=-1) + overlap
    return np.clip(left / np.where(total > 0, total, 1.0), 0.0, None)


def subspace_overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """SO = Tr(U1^T U2 U2^T U1) / r (OjaKV, section 4), `[...]`; 1 for one span, r / W for random ones.

    Args:
        first, second: orthonormal `[..., W, R]` and `[..., W, R']`; r is R, the rank of the first.
    """
    cross = np.asarray(first, np.float64).swapaxes(-1, -2) @ np.asarray(second, np.float64)
    return np.sum(cross**2, axis=(-2, -1)) / cross.shape[-2]


def spectrum(moment: np.ndarray) -> np.ndarray:
    """Share of the energy of each principal direction, `[..., W]`, descending, sum 1 (0 without energy)."""
    values = np.clip(np.linalg.eigvalsh(np.asarray(moment, np.float64))[..., ::-1], 0.0, None)
    total = values.sum(-1, keepdims=True)
    return values / np.where(total > 0, total, 1.0)


def rank_of_energy(moment: np.ndarray, energy: float) -> np.ndarray:
    """Smallest rank, int `[...]`, of each second moment `[..., W, W]` that holds the share `energy`."""
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r}: must lie in (0, 1]")
    held = np.cumsum(spectrum(moment), axis=-1)
    return np.minimum(np.sum(held < energy * (1 - 1e-12), axis=-1) + 1, held.shape[-1])


def principal_basis(moment: np.ndarray, rank: int) -> np.ndarray:
    """The oracle: leading `rank` eigenvectors `[..., W, R]` of second moments `[..., W, W]`."""
    return np.linalg.eigh(np.asarray(moment, np.float64))[1][..., ::-1][..., :rank]


def reconstruction_cosine(x: np.ndarray, approximation: np.ndarray) -> np.ndarray:
    """Cosine of tokens `[..., T, W]` and what stands for them, mean over T, `[...]`; 0 for zero tokens."""
    x, y = np.asarray(x, np.float64), np.asarray(approximation, np.float64)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.mean(np.sum(x * y, axis=-1) / np.where(norms > 0, norms, 1.0), axis=-1)
