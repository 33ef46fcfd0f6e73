"""The registered methods. Adding one: a file here, and its name in this import."""

from lowrank_kv_jax.method import REGISTRY as REGISTRY
from lowrank_kv_jax.methods import full, minicache, ojakv, single_svd, static_pca, windowed, xkv  # noqa: F401
from lowrank_kv_jax.methods.full import Full
from lowrank_kv_jax.methods.minicache import MiniCache
from lowrank_kv_jax.methods.ojakv import OjaKV
from lowrank_kv_jax.methods.single_svd import SingleSVD
from lowrank_kv_jax.methods.static_pca import EigenAttention, EigenN, StaticPCA, StaticPCAH
from lowrank_kv_jax.methods.windowed import SlidingWindow, StreamingLLM
from lowrank_kv_jax.methods.xkv import XKV

__all__ = [
    "REGISTRY", "EigenAttention", "EigenN", "Full", "MiniCache", "OjaKV", "SingleSVD", "SlidingWindow", "StaticPCA", "StaticPCAH",
    "StreamingLLM", "XKV",
]
