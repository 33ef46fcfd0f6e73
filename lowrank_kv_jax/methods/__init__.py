"""The registered methods. Adding one: a file in `codecs` or `selections`, and its name in this import."""

from lowrank_kv_jax.codecs.kivi import KIVI
from lowrank_kv_jax.codecs.minicache import MiniCache
from lowrank_kv_jax.codecs.ojakv import OjaKV
from lowrank_kv_jax.codecs.osp import OnlineSubspaceProjection
from lowrank_kv_jax.codecs.osp_static import StaticSubspace
from lowrank_kv_jax.codecs.palu import Palu
from lowrank_kv_jax.codecs.shadowkv import ShadowKV
from lowrank_kv_jax.codecs.single_svd import SingleSVD
from lowrank_kv_jax.codecs.static_pca import EigenAttention, EigenN, StaticPCA, StaticPCAH
from lowrank_kv_jax.codecs.streamingkv import StreamingKV
from lowrank_kv_jax.codecs.transform import Transform
from lowrank_kv_jax.codecs.verbatim import Full
from lowrank_kv_jax.codecs.xkv import XKV
from lowrank_kv_jax.method import REGISTRY as REGISTRY
from lowrank_kv_jax.methods.compose import compose, machine_of
from lowrank_kv_jax.methods.plugins import load_plugins
from lowrank_kv_jax.selections.adakv import AdaKV
from lowrank_kv_jax.selections.h2o import H2O
from lowrank_kv_jax.selections.kvzip import KVzip
from lowrank_kv_jax.selections.momentkv import MomentKV
from lowrank_kv_jax.selections.pyramidkv import PyramidKV
from lowrank_kv_jax.selections.quest import Quest
from lowrank_kv_jax.selections.recent import SlidingWindow, StreamingLLM
from lowrank_kv_jax.selections.scissorhands import Scissorhands
from lowrank_kv_jax.selections.snapkv import SnapKV

__all__ = [
    "REGISTRY", "AdaKV", "EigenAttention", "EigenN", "Full", "H2O", "KIVI", "KVzip", "MiniCache", "MomentKV", "OjaKV",
    "OnlineSubspaceProjection", "Palu", "PyramidKV", "Quest", "Scissorhands", "ShadowKV", "SingleSVD", "SlidingWindow",
    "SnapKV", "StaticPCA", "StaticPCAH", "StaticSubspace", "StreamingKV", "StreamingLLM", "Transform", "XKV", "compose",
    "machine_of",
]

load_plugins()  # last: a plugin finds all that is here
