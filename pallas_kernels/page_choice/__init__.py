"""Which pages of the stored tokens a decoded query is to read: their logits, and the choice of the pages."""

from lowrank_kv_jax.pallas_kernels.page_choice.api import choose_pages, page_logits

__all__ = ["choose_pages", "page_logits"]
