"""(FL)²: SemiFL's round with thresholds, steps and averages that follow how far each client has got."""
