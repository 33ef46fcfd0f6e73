"""Which tokens stay: scores, budgets of layers and heads, and the choice itself. One file a rule, pure functions."""
