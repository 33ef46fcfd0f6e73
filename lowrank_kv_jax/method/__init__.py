"""The contracts (part, codec, selection), and the machine that makes a cache of them."""

from lowrank_kv_jax.method.kv_method import Fault as Fault
from lowrank_kv_jax.method.kv_method import KVMethod as KVMethod
from lowrank_kv_jax.method.layout import Layout as Layout
from lowrank_kv_jax.method.layout import Place as Place
from lowrank_kv_jax.method.part import Part as Part
from lowrank_kv_jax.method.registry import REGISTRY as REGISTRY
from lowrank_kv_jax.method.registry import register as register
