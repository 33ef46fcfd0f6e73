"""The registered methods. Adding one: a file here, and its name in this import."""

from lowrank_kv_jax.method import REGISTRY as REGISTRY
from lowrank_kv_jax.methods import full, minicache, ojakv, single_svd, static_pca, windowed, xkv  # noqa: F401
from lowrank_kv_jax.methods.adakv import AdaKV
from lowrank_kv_jax.methods.composed import compose
from lowrank_kv_jax.methods.full import Full
from lowrank_kv_jax.methods.h2o import H2O
from lowrank_kv_jax.methods.kivi import KIVI
from lowrank_kv_jax.methods.kvzip import KVzip
from lowrank_kv_jax.methods.minicache import MiniCache
from lowrank_kv_jax.methods.momentkv import MomentKV
from lowrank_kv_jax.methods.ojakv import OjaKV
from lowrank_kv_jax.methods.osp import OnlineSubspaceProjection
from lowrank_kv_jax.methods.osp_static import StaticSubspace
from lowrank_kv_jax.methods.palu import Palu
from lowrank_kv_jax.methods.pyramidkv import PyramidKV
from lowrank_kv_jax.methods.scissorhands import Scissorhands
from lowrank_kv_jax.methods.single_svd import SingleSVD
from lowrank_kv_jax.methods.snapkv import SnapKV
from lowrank_kv_jax.methods.static_pca import EigenAttention, EigenN, StaticPCA, StaticPCAH
from lowrank_kv_jax.methods.streamingkv import StreamingKV
from lowrank_kv_jax.methods.windowed import SlidingWindow, StreamingLLM
from lowrank_kv_jax.methods.xkv import XKV

__all__ = [
    "REGISTRY", "AdaKV", "EigenAttention", "EigenN", "Full", "H2O", "KIVI", "KVzip", "MiniCache", "MomentKV", "OjaKV",
    "OnlineSubspaceProjection", "Palu", "PyramidKV", "Scissorhands", "SingleSVD", "SlidingWindow", "SnapKV", "StaticPCA",
    "StaticPCAH", "StaticSubspace", "StreamingKV", "StreamingLLM", "XKV", "compose",
]
