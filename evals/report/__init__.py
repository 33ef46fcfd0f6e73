"""Tables and figures from records: what each method keeps against what it stores."""

from lowrank_kv_jax.evals.report.figures import draw_figures
from lowrank_kv_jax.evals.report.markdown import markdown
from lowrank_kv_jax.evals.report.page import page
from lowrank_kv_jax.evals.report.sections import Section, read_report, read_sections

__all__ = ["Section", "draw_figures", "markdown", "page", "read_report", "read_sections"]
