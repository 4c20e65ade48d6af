"""What score policies share: selection of slots, stages of scores, budgets of heads."""
