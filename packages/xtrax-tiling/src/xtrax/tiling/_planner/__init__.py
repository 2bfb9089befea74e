"""How a planner decides: budgets of memory, chunks that fit them, and duplicates that pay."""
